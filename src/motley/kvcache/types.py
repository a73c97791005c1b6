"""The types that K and V can be stored in, and what a token costs in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from motley.errors import ConfigError
from motley.formats import QUANTIZERS, Quantizer

TILE = 32  # dims that are stored together; a quantized type has one scale (and minimum) for each tile


@dataclass(frozen=True)
class Plane:
    """One kind of number in a tile: `width` items of `dtype` for each token."""

    name: str
    dtype: torch.dtype
    width: int

    @property
    def n_bytes(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class CacheType:
    """A storage type: plain numbers, or the planes of a 32-value quantizer."""

    name: str
    planes: tuple[Plane, ...]
    quantizer: Quantizer | None = None

    @property
    def is_quantized(self) -> bool:
        return self.quantizer is not None

    @property
    def tile_bytes(self) -> int:
        """Bytes for 32 values."""
        return sum(plane.n_bytes for plane in self.planes)

    def head_bytes(self, head_dim: int) -> int:
        """Bytes for one head of one token; the last tile is padded."""
        return -(-head_dim // TILE) * self.tile_bytes


def _plain(name: str, dtype: torch.dtype) -> CacheType:
    return CacheType(name, (Plane("values", dtype, TILE),))


def _quantized(name: str) -> CacheType:
    quantizer = QUANTIZERS[name.upper()]
    if quantizer.bits == 8:
        planes = [Plane("codes", torch.uint8, TILE)]
    else:
        planes = [Plane("codes", torch.uint8, TILE // 2)]  # value i shares its byte with value i + 16
    if quantizer.bits == 5:
        planes.append(Plane("high_bits", torch.uint8, TILE // 8))
    planes.append(Plane("scale", torch.float16, 1))
    if quantizer.has_minimum:
        planes.append(Plane("minimum", torch.float16, 1))
    return CacheType(name, tuple(planes), quantizer)


CACHE_TYPES: Mapping[str, CacheType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            _plain("f32", torch.float32),
            _plain("f16", torch.float16),
            _plain("bf16", torch.bfloat16),
            *map(_quantized, ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")),
        )
    }
)


def get_cache_type(name: str) -> CacheType:
    """The type of that name, in any case; ConfigError with the list otherwise."""
    kind = CACHE_TYPES.get(str(name).lower())
    if kind is None:
        raise ConfigError(f"unknown KV cache type {name!r}", hint=f"there are: {', '.join(CACHE_TYPES)}")
    return kind
