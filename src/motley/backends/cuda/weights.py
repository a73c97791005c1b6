"""Weights on the device: matrices in planes, siblings joined so that one launch multiplies by all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from motley.backends.base import LoadedWeight
from motley.backends.cuda.borrowing import Borrowing
from motley.backends.cuda.planes import WeightPlanes, join_rows, to_planes
from motley.backends.cuda.products import Copies
from motley.backends.cuda.upload import Uploader
from motley.formats import PackedTensor


class PlaneRef:
    """The present place of a matrix's planes: separate, or in a joined matrix. A thread may still be making them."""

    def __init__(self, planes: WeightPlanes | Future[WeightPlanes]) -> None:
        self._planes = planes

    @property
    def planes(self) -> WeightPlanes:
        if isinstance(self._planes, Future):
            self._planes = self._planes.result()
        return self._planes

    @planes.setter
    def planes(self, planes: WeightPlanes) -> None:
        self._planes = planes


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """A matrix on the device, in planes."""

    ref: PlaneRef

    @property
    def nbytes(self) -> int:
        return self.ref.planes.n_bytes

    def unpack(self) -> torch.Tensor:
        raise AssertionError("only products read a matrix in planes")


@dataclass(frozen=True, eq=False)
class BorrowedMatrix:
    """A matrix, or those of experts, in the host's memory, copied for each batch that needs it (see `borrowing`)."""

    source: PackedTensor  # (rows, columns) or (experts, rows, columns), as in the file

    @property
    def nbytes(self) -> int:
        return 0  # of the device's memory

    def unpack(self) -> torch.Tensor:
        raise AssertionError("only products read borrowed experts")


DeviceWeight = PackedTensor | DeviceMatrix | BorrowedMatrix


class Repacker:
    """Makes planes of matrices on the device, on a thread: the next matrix is read from the file meanwhile.

    At most one matrix waits while another one is repacked, so that little memory is taken twice.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        self._latest: deque[Future[WeightPlanes]] = deque()

    def repack(self, weight: PackedTensor) -> Future[WeightPlanes]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="motley-repacking")
        while len(self._latest) > 1:
            self._latest.popleft().result()
        self._latest.append(self._thread.submit(self._planes, weight))
        return self._latest[-1]

    def finish(self) -> None:
        """Wait for all matrices, and end the thread."""
        while self._latest:
            self._latest.popleft().result()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _planes(self, weight: PackedTensor) -> WeightPlanes:
        if self._device.type != "cuda":
            return to_planes(weight)
        with torch.cuda.device(self._device):
            return to_planes(weight)


def load(
    weight: PackedTensor,
    device: torch.device,
    uploader: Uploader | None = None,
    repacker: Repacker | None = None,
) -> DeviceWeight:
    """Matrices become planes on the device, those of experts as one of all their rows; anything else is copied."""
    data = weight.data.to(device) if uploader is None else uploader.upload(weight.data)
    n_axes = len(weight.shape)
    on_device = PackedTensor(data.flatten(0, 1) if n_axes == 3 else data, weight.format)
    if n_axes not in (2, 3):
        return on_device
    return DeviceMatrix(PlaneRef(to_planes(on_device) if repacker is None else repacker.repack(on_device)))


def own_weights(weights: Mapping[str, LoadedWeight]) -> dict[str, DeviceWeight]:
    """The same, which this backend has loaded, or which are still as in the file."""
    assert all(isinstance(weight, DeviceWeight) for weight in weights.values())
    return {name: weight for name, weight in weights.items() if isinstance(weight, DeviceWeight)}


class Matrices:
    """All matrices of one model on one device by weight name. Those that are joined become rows of one allocation."""

    def __init__(
        self,
        device: torch.device,
        copies: Copies | None = None,
        n_ahead: int = 2,
        join: Callable[[Sequence[WeightPlanes]], WeightPlanes] = join_rows,
        borrowed_planes: Callable[[PackedTensor, int], WeightPlanes] | None = None,
    ) -> None:
        """`join`, `borrowed_planes`: how planes of several matrices, and those of `Borrowing`, are made."""
        self.device = device
        self._join = join
        self.copies = copies or Copies()
        self.borrowing = Borrowing(device, n_ahead, borrowed_planes)
        self._small: dict[Hashable, torch.Tensor] = {}
        self._refs: dict[str, PlaneRef] = {}
        self._joined: dict[tuple[str, ...], WeightPlanes] = {}

    def small(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A small tensor that all plans share, made once: a plan should not wait for the GPU."""
        if key not in self._small:
            self._small[key] = make()
        return self._small[key]

    def get(self, name: str, weights: Mapping[str, DeviceWeight]) -> WeightPlanes:
        """A weight that is still in the file, because it is only looked up by row, is loaded now."""
        if name not in self._refs:
            weight = weights[name]
            if isinstance(weight, BorrowedMatrix):
                return self.borrowing.planes(name)
            loaded = load(weight, self.device) if isinstance(weight, PackedTensor) else weight
            assert isinstance(loaded, DeviceMatrix), f"{name} is no matrix"
            self._refs[name] = loaded.ref
        return self._refs[name].planes

    def copies_of(self, name: str, weights: Mapping[str, DeviceWeight]) -> Copies:
        """The store of a matrix's float16 copy; an empty one for a borrowed matrix, whose memory others use, too."""
        return Copies() if isinstance(weights[name], BorrowedMatrix) else self.copies

    def joined(self, names: Sequence[str], weights: Mapping[str, DeviceWeight]) -> WeightPlanes:
        """The matrices on top of each other."""
        key = tuple(names)
        if len(key) == 1:
            return self.get(key[0], weights)
        if isinstance(weights[key[0]], BorrowedMatrix):
            return self.borrowing.joined(key)
        if key not in self._joined:
            parts = [self.get(name, weights) for name in key]
            whole, start = self._join(parts), 0
            for name, part in zip(key, parts, strict=True):
                self._refs[name].planes = whole.rows(start, start + part.n_rows)
                start += part.n_rows
            self._joined[key] = whole
        return self._joined[key]
