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
    key_positions: torch.Tensor  # of each cached key; the last ones are of these rows
    # bool (rows, rows), if these rows are a tree: the rows that each of them sees, itself too. None: all before it.
    seen: torch.Tensor | None

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as float32 (context, heads, dim), including this batch's."""
        ...


class CacheLayer(Protocol):
    """One layer of the cache, on one device, for one batch. `CacheStore` writes to it and `Attention` reads from it."""

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the batch's keys and values, each (tokens, heads, dim)."""
        ...

    def sequences(self) -> Iterator[CachedSequence]: ...


class StateSequence(Protocol):
    """One sequence's rows of a batch, and its recurrent state, which includes all tokens before its pending ones."""

    rows: slice  # of the batch
    n_folded: int  # how many of these rows the stored state includes after the batch; the others stay pending

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The state as float32 (zeros for a new sequence), and the stored inputs of pending tokens, oldest first."""
        ...

    def write(self, state: torch.Tensor, pending: torch.Tensor) -> None:
        """Store the state after pending tokens and `n_folded` rows, and the inputs of the other rows."""
        ...


class StateLayer(Protocol):
    """One part of a layer's recurrent state, on one device, for one batch."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sequence's state."""
        ...

    def sequences(self) -> Iterator[StateSequence]: ...
