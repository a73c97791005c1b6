"""K/V and states of a process's devices as bytes. Their sizes follow from the cache plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from motley.kvcache.state_arena import STATE_TYPES, StatePart
from motley.kvcache.types import TILE, CacheType
from motley.runtime.caching import CachePlan
from motley.runtime.hosts.protocol import ProtocolError


class PlaneSizes:
    """The sizes of one device's K/V of a layer: it travels as the bytes of its planes, one after the other."""

    def __init__(self, kinds: Sequence[CacheType], head_dim: int) -> None:
        self._kinds = kinds
        self._n_tiles = -(-head_dim // TILE)

    def to_bytes(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> bytes:
        planes = (
            part[plane.name] for part, kind in zip(parts, self._kinds, strict=True) for plane in kind.planes
        )
        return b"".join(p.cpu().contiguous().view(torch.uint8).numpy().tobytes() for p in planes)

    def n_bytes(self, n_tokens: int, n_heads: int) -> int:
        return n_tokens * n_heads * self._n_tiles * sum(kind.tile_bytes for kind in self._kinds)

    def from_bytes(self, data: bytes, n_tokens: int, n_heads: int) -> tuple[dict[str, torch.Tensor], ...]:
        """K and V. `data` has exactly `n_bytes`."""
        found, position = [], 0
        for kind in self._kinds:
            planes = {}
            for plane in kind.planes:
                shape = n_tokens, n_heads, self._n_tiles, plane.width
                n_bytes = math.prod(shape) * plane.dtype.itemsize
                items = bytearray(data[position : position + n_bytes])
                planes[plane.name] = (
                    torch.frombuffer(items, dtype=plane.dtype).view(shape)
                    if items
                    else torch.empty(shape, dtype=plane.dtype)
                )
                position += n_bytes
            found.append(planes)
        return tuple(found)


class StateSizes:
    """The sizes of one device's parts of a layer's state: they travel as their bytes, one after the other."""

    def __init__(self, kind: str, parts: Sequence[StatePart]) -> None:
        self._dtype = STATE_TYPES[kind]
        self._parts = parts

    def to_bytes(self, layer: int, parts: Sequence[Mapping[str, torch.Tensor]]) -> bytes:
        """The device's own parts; `parts` may have others, too."""
        given = {name: part for named in parts for name, part in named.items()}
        own = [given[part.name] for part in self._parts if part.layer == layer]
        return b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in own)

    def n_bytes(self, layer: int) -> int:
        own = [part for part in self._parts if part.layer == layer]
        return sum(math.prod(part.shape) * self._dtype.itemsize for part in own)

    def from_bytes(self, layer: int, data: bytes) -> tuple[dict[str, torch.Tensor], ...]:
        """The parts of the bytes, by name. `data` has exactly `n_bytes`."""
        found, position = [], 0
        for part in (part for part in self._parts if part.layer == layer):
            n_bytes = math.prod(part.shape) * self._dtype.itemsize
            items = bytearray(data[position : position + n_bytes])
            empty = torch.empty(part.shape, dtype=self._dtype)
            found.append(
                {part.name: torch.frombuffer(items, dtype=self._dtype).view(part.shape) if items else empty}
            )
            position += n_bytes
        return tuple(found)


class DeviceBytes:
    """One device's part of a layer, K/V or state, as bytes."""

    def __init__(self, plan: CachePlan, device: int) -> None:
        config = plan.config
        self._heads = plan.heads[device]
        self._planes = PlaneSizes((config.k_type, config.v_type), plan.head_dim)
        states = plan.states
        self._state_layers = frozenset(() if states is None else states.layers)
        self._states = StateSizes(config.state_type, () if states is None else states.parts[device])

    def to_bytes(self, layer: int, parts: Sequence[Mapping[str, torch.Tensor]]) -> bytes:
        if layer in self._state_layers:
            return self._states.to_bytes(layer, parts)
        return self._planes.to_bytes(parts)

    def n_bytes(self, layer: int, n_tokens: int) -> int:
        if layer in self._state_layers:
            return self._states.n_bytes(layer)
        return self._planes.n_bytes(n_tokens, self._heads.get(layer, 0))

    def from_bytes(self, layer: int, data: bytes, n_tokens: int) -> tuple[dict[str, torch.Tensor], ...]:
        if layer in self._state_layers:
            return self._states.from_bytes(layer, data)
        return self._planes.from_bytes(data, n_tokens, self._heads.get(layer, 0))


def split_bytes(
    devices: Sequence[DeviceBytes], layer: int, n_tokens: int, data: bytes
) -> list[tuple[dict[str, torch.Tensor], ...]]:
    """The parts of all devices of a process. ProtocolError if `data` has another size."""
    sizes = [device.n_bytes(layer, n_tokens) for device in devices]
    if len(data) != sum(sizes):
        raise ProtocolError(f"{len(data)} bytes of the cache instead of {sum(sizes)}")
    found, position = [], 0
    for device, n_bytes in zip(devices, sizes, strict=True):
        found.append(device.from_bytes(layer, data[position : position + n_bytes], n_tokens))
        position += n_bytes
    return found
