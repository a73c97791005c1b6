"""Weights on the device: matrices in planes, neighbours joined so that one launch multiplies by all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from motley.backends.cuda.planes import WeightPlanes, join_rows, to_planes
from motley.formats import PackedTensor


@dataclass(eq=False)
class Home:
    """Where a matrix's planes are now: on their own, or rows of a joined matrix."""

    planes: WeightPlanes


@dataclass(frozen=True, eq=False)
class DeviceWeight(PackedTensor):
    """A weight on the device. A matrix lies in planes; `data` has its shape then, but no memory."""

    home: Home | None = None

    @property
    def nbytes(self) -> int:
        return super().nbytes if self.home is None else self.home.planes.n_bytes


def load(weight: PackedTensor, device: torch.device) -> DeviceWeight:
    """Matrices become planes on the device; anything else is copied as it is."""
    on_device = weight.to(device)
    if len(weight.shape) != 2:
        return DeviceWeight(on_device.data, weight.format)
    planes = to_planes(on_device)
    shape_only = torch.empty(1, dtype=torch.uint8, device="meta").expand(on_device.data.shape)
    return DeviceWeight(shape_only, weight.format, Home(planes))


class Matrices:
    """All matrices of one device by weight name. Those that are joined become rows of one allocation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._homes: dict[str, Home] = {}
        self._joined: dict[tuple[str, ...], WeightPlanes] = {}

    def get(self, name: str, weights: Mapping[str, PackedTensor]) -> WeightPlanes:
        """A weight that is still in the file, because it is only looked up by row, is loaded now."""
        if name not in self._homes:
            weight = weights[name]
            loaded = weight if isinstance(weight, DeviceWeight) else load(weight, self.device)
            assert loaded.home is not None, f"{name} is no matrix"
            self._homes[name] = loaded.home
        return self._homes[name].planes

    def joined(self, names: Sequence[str], weights: Mapping[str, PackedTensor]) -> WeightPlanes:
        """The matrices on top of each other."""
        key = tuple(names)
        if len(key) == 1:
            return self.get(key[0], weights)
        if key not in self._joined:
            parts = [self.get(name, weights) for name in key]
            whole, start = join_rows(parts), 0
            for name, part in zip(key, parts, strict=True):
                self._homes[name].planes = whole.rows(start, start + part.n_rows)
                start += part.n_rows
            self._joined[key] = whole
        return self._joined[key]
