"""The paged cache as backends read it. These are kvcache.arena's classes, which stand above backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Kind(Protocol):
    @property
    def name(self) -> str: ...


class Store(Protocol):
    """K or V of some layers: planes (block, row, tile, token, width), see kvcache/store.py."""

    block_size: int
    head_dim: int
    planes: Mapping[str, torch.Tensor]

    @property
    def kind(self) -> Kind: ...


class Table(Protocol):
    @property
    def first_row(self) -> int: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def blocks(self) -> npt.NDArray[np.int32]: ...
    @property
    def seen(self) -> npt.NDArray[np.uint64] | None:
        """If its rows are a tree: for each row the bits of the rows that it sees, itself included."""
        ...


class Batch(Protocol):
    @property
    def slots(self) -> torch.Tensor: ...
    @property
    def tables(self) -> Sequence[Table]: ...


class StateBatch(Protocol):
    """The slots that a batch reads and writes recurrent states in."""

    @property
    def table(self) -> npt.NDArray[np.int64]:
        """Nine numbers for each sequence, see kvcache.state_arena.StateSpan."""
        ...


class StatePlanes(Protocol):
    """The memory of one part of a layer's recurrent state; the same object in every batch."""

    @property
    def states(self) -> torch.Tensor: ...
    @property
    def rings(self) -> torch.Tensor: ...


class PagedLayer(Protocol):
    """The memory of one layer's keys and values; the same object in every batch."""

    @property
    def keys(self) -> Store: ...
    @property
    def values(self) -> Store: ...
    @property
    def rows(self) -> slice: ...
    @property
    def group(self) -> int:
        """Layers of one group share their block tables; the same number on every device."""
        ...


class BatchLayer(Protocol):
    """The value of a graph's cache input at run time: a layer, and the batch's block tables."""

    @property
    def layer(self) -> PagedLayer: ...
    @property
    def batch(self) -> Batch: ...
