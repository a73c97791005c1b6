"""The bytes of K or of V on one device: planes of tiles.

Each plane is (block, row, tile, token, width): a block's tokens lie together within a 32-dim tile, so a kernel that
walks a block reads one contiguous run per tile. A *row* is one KV head of one layer; rows of a layer are adjacent.
All of a block's rows are one contiguous range of each plane, so a freed block can give its memory back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from motley.errors import DeviceError
from motley.formats import Planes
from motley.formats.bits import join_bits, split_bits
from motley.kvcache.types import TILE, CacheType
from motley.units import show_bytes

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def allocate_zeroed(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch's words for it say neither what it was for nor what to do
        n_bytes = prod(shape) * dtype.itemsize
        raise DeviceError(
            f"{device or 'cpu'} has no memory for {show_bytes(n_bytes)} of KV cache",
            hint="lower the context (-c), the parallel requests or the cache's limit (--kv-cache-bytes)",
        ) from error


class Store:
    """K or V of `n_rows` heads in blocks of `block_size` tokens. Writes and reads take slots: block · size + offset."""

    def __init__(
        self,
        kind: CacheType,
        *,
        n_blocks: int,
        block_size: int,
        n_rows: int,
        head_dim: int,
        allocate: Allocate = allocate_zeroed,
    ) -> None:
        self.kind = kind
        self.block_size = block_size
        self.head_dim = head_dim
        self.n_tiles = -(-head_dim // TILE)
        self.planes = {
            plane.name: allocate((n_blocks, n_rows, self.n_tiles, block_size, plane.width), plane.dtype)
            for plane in kind.planes
        }

    @property
    def n_bytes(self) -> int:
        return sum(plane.numel() * plane.itemsize for plane in self.planes.values())

    def write(self, rows: slice, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Store values (tokens, heads, dim) at `slots` (tokens,) of `rows`."""
        self.scatter(rows, slots, self._encode(_tiled(values, self.n_tiles)))

    def read(self, rows: slice, slots: torch.Tensor) -> torch.Tensor:
        """float32 (tokens, heads, dim) of `slots` (tokens,) of `rows`."""
        tiles = self._decode(self.gather(rows, slots))  # (tokens, heads, tiles, 32)
        return tiles.flatten(-2)[..., : self.head_dim]

    def gather(self, rows: slice, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """The stored data of each plane, packed: (tokens, heads, tiles, width)."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return {name: plane[:, rows][blocks, :, :, offsets] for name, plane in self.planes.items()}

    def scatter(self, rows: slice, slots: torch.Tensor, items: Mapping[str, torch.Tensor]) -> None:
        """The reverse of `gather`."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        for name, plane in self.planes.items():
            plane[:, rows][blocks, :, :, offsets] = items[name].to(plane.device)

    def copy_slots(self, places: torch.Tensor) -> None:
        """Copy tokens from the slots places[0] to places[1], all heads, as they are stored."""
        places = places.to(next(iter(self.planes.values())).device)
        (source, target), (i, j) = places // self.block_size, places % self.block_size
        for plane in self.planes.values():
            plane[target, :, :, j] = plane[source, :, :, i]

    def copy_block(self, source: int, target: int, n_tokens: int) -> None:
        for plane in self.planes.values():
            plane[target, :, :, :n_tokens] = plane[source, :, :, :n_tokens]

    def _encode(self, tiles: torch.Tensor) -> dict[str, torch.Tensor]:
        quantizer = self.kind.quantizer
        if quantizer is None:
            return {"values": tiles.to(self.kind.planes[0].dtype)}
        planes = quantizer.quantize(tiles)
        items: dict[str, Any] = {"scale": planes.scale, "minimum": planes.minimum}
        if quantizer.bits == 8:
            items["codes"] = planes.codes
        else:
            items["codes"] = join_bits(planes.codes & 0x0F, bits=4, width=TILE // 2)
        if quantizer.bits == 5:
            items["high_bits"] = join_bits(planes.codes >> 4, bits=1, width=1)
        return {name: item for name, item in items.items() if item is not None}

    def _decode(self, items: dict[str, torch.Tensor]) -> torch.Tensor:
        quantizer = self.kind.quantizer
        if quantizer is None:
            return items["values"].float()
        codes = items["codes"]
        if quantizer.bits != 8:
            codes = split_bits(codes, bits=4, width=TILE // 2)
        if quantizer.bits == 5:
            codes = codes | split_bits(items["high_bits"], bits=1, width=1) << 4
        return quantizer.dequantize(Planes(codes, items["scale"], items.get("minimum")))


def _tiled(values: torch.Tensor, n_tiles: int) -> torch.Tensor:
    """(tokens, heads, dim) → (tokens, heads, tiles, 32), the last tile padded with zeros."""
    padding = n_tiles * TILE - values.shape[-1]
    return torch.unflatten(F.pad(values, (0, padding)), -1, (n_tiles, TILE))
