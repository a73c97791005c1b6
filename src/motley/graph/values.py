"""What references compute with: torch tensors, packed weights, a layer of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from motley.formats import PackedTensor

Value = torch.Tensor | PackedTensor


def dense(value: Value) -> torch.Tensor:
    """The values themselves; unpacked if they are packed."""
    return value.unpack() if isinstance(value, PackedTensor) else value


class CachedSequence(Protocol):
    """One sequence's part of a batch, and its whole context in the cache."""

    rows: torch.Tensor  # int64: which rows of the batch belong to it
    positions: torch.Tensor  # of those rows
    key_positions: torch.Tensor  # of each cached key, ascending

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as float32 (context, heads, dim), those of this batch included."""
        ...


class CacheLayer(Protocol):
    """What cache_store writes to and attention reads from: one layer, on one device, for one batch."""

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the batch's keys and values, each (tokens, heads, dim)."""
        ...

    def sequences(self) -> Iterator[CachedSequence]: ...
