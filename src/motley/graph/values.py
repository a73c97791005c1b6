"""Types of values that reference implementations take: torch tensors, packed weights, a layer of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch


class PackedValue(Protocol):
    """A weight that stays packed: a PackedTensor, or a backend's own form of it."""

    def unpack(self) -> torch.Tensor: ...

    def rows(self, index: torch.Tensor) -> torch.Tensor: ...


Value = torch.Tensor | PackedValue


def dense(value: Value) -> torch.Tensor:
    """The value as a torch tensor, unpacked if it is packed."""
    return value if isinstance(value, torch.Tensor) else value.unpack()


class CachedSequence(Protocol):
    """One sequence's part of a batch, and its whole context in the cache."""

    rows: torch.Tensor  # int64: which rows of the batch belong to it
    positions: torch.Tensor  # of these rows
    key_positions: torch.Tensor  # of each cached key, ascending

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as float32 (context, heads, dim), including this batch's."""
        ...


class CacheLayer(Protocol):
    """One layer of the cache, on one device, for one batch. `CacheStore` writes to it and `Attention` reads from it."""

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the batch's keys and values, each (tokens, heads, dim)."""
        ...

    def sequences(self) -> Iterator[CachedSequence]: ...
