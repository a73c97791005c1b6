"""What one device holds of the cache: a store for K and one for V in each block group, and its layers' rows in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from motley.graph.values import CachedSequence
from motley.kvcache.paging import PagedMemory
from motley.kvcache.sequences import BlockCopy, BlockShift
from motley.kvcache.store import Store, allocate_zeroed
from motley.kvcache.types import CacheType

# (layer, keys (tokens, heads, dim) as they are stored, by how many positions they move) → keys for their new positions
KeyTurn = Callable[[int, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share block tables, as this device sees them: which they are and how many KV heads it has of each."""

    layers: tuple[int, ...]
    n_heads: tuple[int, ...]  # of each layer, on this device; may be 0
    n_blocks: int


@dataclass(frozen=True)
class SequenceTable:
    """One sequence's rows in a batch, and where its context lies in one group."""

    rows: torch.Tensor  # int64: rows of the batch
    positions: torch.Tensor  # int64, of those rows
    first: int  # the first position that is still stored
    slots: torch.Tensor  # int64: of positions first, first + 1, … up to the batch's last, this batch included


@dataclass(frozen=True)
class GroupBatch:
    """Where a batch writes and reads in one group."""

    slots: torch.Tensor  # int64 (tokens,): where each row's K and V go
    tables: tuple[SequenceTable, ...]


class Arena:
    """K and V of one device. Block ids mean the same on every device; each stores only its own heads."""

    def __init__(
        self,
        k_type: CacheType,
        v_type: CacheType,
        groups: Sequence[LayerGroup],
        *,
        block_size: int,
        head_dim: int,
        demand_paged: bool = False,
        device: torch.device | None = None,  # None: the CPU
    ) -> None:
        self._block_size = block_size
        self._memory = [PagedMemory() if demand_paged else None for _ in groups]
        self._empty = [set(range(group.n_blocks)) for group in groups]  # blocks that hold nothing
        self._stores: list[tuple[Store, Store]] = []
        self._places: dict[int, tuple[int, slice]] = {}  # layer → group, rows
        for number, (group, memory) in enumerate(zip(groups, self._memory, strict=True)):
            row = 0
            for layer, n_heads in zip(group.layers, group.n_heads, strict=True):
                self._places[layer] = (number, slice(row, row + n_heads))
                row += n_heads
            keys, values = (
                Store(
                    kind,
                    n_blocks=group.n_blocks,
                    block_size=block_size,
                    n_rows=row,
                    head_dim=head_dim,
                    allocate=partial(allocate_zeroed, device=device) if memory is None else memory.allocate,
                )
                for kind in (k_type, v_type)
            )
            self._stores.append((keys, values))

    @property
    def n_bytes(self) -> int:
        return sum(self.group_bytes())

    def group_bytes(self) -> list[int]:
        """Of each group, as allocated."""
        return [keys.n_bytes + values.n_bytes for keys, values in self._stores]

    @property
    def n_resident(self) -> int:
        """Bytes in memory at this moment: all of them, unless the arena is demand-paged."""
        return sum(
            memory.n_resident if memory is not None else keys.n_bytes + values.n_bytes
            for memory, (keys, values) in zip(self._memory, self._stores, strict=True)
        )

    def begin(self, batch: Sequence[GroupBatch], copies: Iterable[BlockCopy]) -> None:
        """Before a batch runs: its blocks are empty no more; carry out its copies-on-write."""
        for empty, group in zip(self._empty, batch, strict=True):
            empty.difference_update((group.slots // self._block_size).tolist())
        self._copy_blocks(copies)

    def _copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            self._empty[copy.group].discard(copy.dst)
            for store in self._stores[copy.group]:
                store.copy_block(copy.src, copy.dst, copy.n_tokens)

    def store_random(self, batch: Sequence[GroupBatch]) -> None:
        """Random keys and values at the batch's slots; all layers of a group get the same, packed once."""
        for number, stores in enumerate(self._stores):
            slots = batch[number].slots
            places = [rows for group, rows in self._places.values() if group == number]
            widest = max(places, key=lambda rows: rows.stop - rows.start)
            for store in stores:
                values = torch.randn(len(slots), widest.stop - widest.start, store.head_dim)
                store.write(widest, slots, values)
                packed = store.gather(widest, slots)
                for rows in places:
                    n_heads = rows.stop - rows.start
                    store.scatter(rows, slots, {name: plane[:, :n_heads] for name, plane in packed.items()})

    def shift(self, shifts: Iterable[BlockShift], turn: KeyTurn) -> None:
        """Move K/V to earlier positions: values as they are, keys turned to where they are now."""
        for shift in shifts:
            self._empty[shift.group].difference_update(slot // self._block_size for slot in shift.targets)
            self._copy_blocks(shift.copies)
            sources, targets = torch.tensor(shift.sources), torch.tensor(shift.targets)
            keys, values = self._stores[shift.group]
            for layer, (group, rows) in self._places.items():
                if group == shift.group and rows.start < rows.stop and len(sources):
                    turned = turn(layer, keys.read(rows, sources), -shift.distance)
                    keys.write(rows, targets, turned)
                    values.scatter(rows, targets, values.gather(rows, sources))

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[dict[str, torch.Tensor], ...]:
        """K and V of this device's heads as they are stored; see Store.gather."""
        group, rows = self._places[layer]
        keys, values = self._stores[group]
        return keys.gather(rows, slots), values.gather(rows, slots)

    def scatter(self, layer: int, slots: torch.Tensor, planes: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """The reverse of `gather`. The slots' blocks hold something from now on."""
        group, rows = self._places[layer]
        self._empty[group].difference_update((slots // self._block_size).tolist())
        for store, items in zip(self._stores[group], planes, strict=True):
            store.scatter(rows, slots, items)

    def give_back(self, emptied: Sequence[Sequence[int]]) -> None:
        """Blocks of each group that hold nothing any more: return their memory, where it is demand-paged."""
        for memory, empty, blocks in zip(self._memory, self._empty, emptied, strict=True):
            empty.update(blocks)
            if memory is not None:
                memory.give_back(blocks, empty)

    def layer(self, layer: int, batch: Sequence[GroupBatch]) -> ArenaLayer:
        """What the graph's cache input of that layer is for this batch."""
        group, rows = self._places[layer]
        return ArenaLayer(*self._stores[group], rows, batch[group])


@dataclass(frozen=True)
class ArenaLayer:
    """One layer of the cache for one batch (graph.values.CacheLayer)."""

    keys: Store
    values: Store
    rows: slice
    batch: GroupBatch

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys.write(self.rows, self.batch.slots, keys)
        self.values.write(self.rows, self.batch.slots, values)

    def sequences(self) -> Iterator[CachedSequence]:
        for table in self.batch.tables:
            yield ArenaSequence(self, table)


class ArenaSequence:
    """One sequence's context in one layer (graph.values.CachedSequence)."""

    def __init__(self, layer: ArenaLayer, table: SequenceTable) -> None:
        self._layer = layer
        self._slots = table.slots
        self.rows = table.rows
        self.positions = table.positions
        self.key_positions = torch.arange(table.first, table.first + len(table.slots))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._layer
        return layer.keys.read(layer.rows, self._slots), layer.values.read(layer.rows, self._slots)
