"""One device's part of the cache: stores for K and V in each block group, and the slots of recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from motley.graph.values import CachedSequence
from motley.kvcache.blocks import slots_of
from motley.kvcache.gpu_paging import GpuPagedMemory, cuda_driver
from motley.kvcache.groups import BlockCopy, BlockShift
from motley.kvcache.paging import PagedMemory
from motley.kvcache.state_arena import StateArena, StateBatch, StateLayout, StatePlanes
from motley.kvcache.store import Store, allocate_zeroed
from motley.kvcache.types import CacheType

IntArray = npt.NDArray[np.int32]
SeenRows = npt.NDArray[np.uint64]
MAX_TREE_ROWS = 64  # of a sequence in a batch: one bit for each

# (layer, keys (tokens, heads, dim) as they are stored, by how many positions they move) → keys for their new positions
KeyRotation = Callable[[int, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share block tables, as this device sees them: which they are and how many KV heads it has of each."""

    layers: tuple[int, ...]
    n_heads: tuple[int, ...]  # of each layer, on this device; may be 0
    n_blocks: int


@dataclass(slots=True)  # not frozen: that takes three times as long to make, and each step makes many
class SequenceTable:
    """One sequence's rows in a batch, and the blocks of one group that hold its context."""

    first_row: int  # of the batch; its rows are adjacent
    n_rows: int
    position: int  # of the first row
    first: int  # the position that `blocks` begin at
    blocks: IntArray  # int32: of positions first, first + block_size, … up to the batch's last, this batch included
    # If the rows are a tree: for each row the bits of the rows that it sees, its ancestors and itself. None: all before
    # it. K/V of row i are in the slot of `position + i`; the position of a row is that of its depth.
    seen: SeenRows | None = None

    @property
    def n_context(self) -> int:
        """Tokens that `blocks` hold, this batch's included."""
        return self.position + self.n_rows - self.first

    def slots(self, block_size: int) -> torch.Tensor:
        """int64: of positions first, first + 1, …"""
        starts = torch.from_numpy(np.asarray(self.blocks)).long()[:, None] * block_size
        return (starts + torch.arange(block_size)).flatten()[: self.n_context]


class GroupBatch:
    """The places that a batch writes and reads in one group."""

    __slots__ = ("_block_size", "_slots", "tables")

    def __init__(
        self, slots: torch.Tensor | None, tables: Iterable[SequenceTable], block_size: int = 0
    ) -> None:
        """`slots`: see the property; None: those of the tables, found when they are asked for. The tables' rows follow
        each other.
        """
        self.tables = tuple(tables)
        self._slots = slots
        self._block_size = block_size

    @staticmethod
    def of(tables: Iterable[SequenceTable], block_size: int, *, at_once: bool = True) -> GroupBatch:
        """A batch of these tables. `at_once`: its slots are found now."""
        batch = GroupBatch(None, tables, block_size)
        if at_once:
            _ = batch.slots
        return batch

    @property
    def slots(self) -> torch.Tensor:
        """int64 (tokens,): where each row's K and V go. Native programs find them by themselves."""
        if self._slots is None:
            slots: list[int] = []
            for table in self.tables:
                start = table.position - table.first
                slots += slots_of(table.blocks, start, start + table.n_rows, self._block_size)
            # By way of numpy: torch takes twenty times as long for a list.
            self._slots = torch.from_numpy(np.array(slots, np.int64))
        return self._slots


@dataclass(eq=False)
class ArenaGroup:
    """The stores of layers that share block tables."""

    keys: Store
    values: Store
    memory: PagedMemory | GpuPagedMemory | None = None  # if it is demand-paged
    empty: set[int] = field(default_factory=set)  # blocks that hold nothing, where memory can be given back

    @property
    def n_bytes(self) -> int:
        return self.keys.n_bytes + self.values.n_bytes

    def touch(self, slots: torch.Tensor) -> None:
        """Their blocks are about to hold something."""
        if self.memory is not None:
            self.fill((slots // self.keys.block_size).tolist())

    def fill(self, blocks: Iterable[int]) -> None:
        """These blocks are about to hold something."""
        if self.memory is not None and (fresh := self.empty.intersection(blocks)):
            self.memory.take(sorted(fresh))
            self.empty -= fresh


CacheBatch = GroupBatch | StateBatch


class _StateMemory:
    """The states of one device, and the memory of their slots."""

    def __init__(
        self, layout: StateLayout, group: int, device: torch.device | None, *, demand_paged: bool
    ) -> None:
        self._memory = _paged_memory(device) if demand_paged else None
        self._empty = set(range(layout.n_slots))
        plain = partial(allocate_zeroed, device=device)
        self.arena = StateArena(
            layout, group, plain if self._memory is None else self._memory.allocate, plain
        )

    @property
    def n_resident(self) -> int:
        n_bytes = self.arena.n_bytes
        return n_bytes if self._memory is None else n_bytes - self.arena.slot_bytes + self._memory.n_resident

    def fill(self, slots: Iterable[int]) -> None:
        """These slots are about to hold something."""
        if self._memory is not None and (fresh := self._empty.intersection(slots)):
            self._memory.take(sorted(fresh))
            self._empty -= fresh

    def give_back(self, slots: Sequence[int]) -> None:
        if self._memory is not None and slots:
            self._empty.update(slots)
            self._memory.give_back(slots, self._empty)


class Arena:
    """K, V and recurrent states of one device. Ids of blocks and slots mean the same on every device; each stores only
    its own heads.
    """

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
        states: StateLayout | None = None,
    ) -> None:
        self._states = (
            None if states is None else _StateMemory(states, len(groups), device, demand_paged=demand_paged)
        )
        self._groups: list[ArenaGroup] = []
        self._layers: dict[int, ArenaLayer] = {}
        for number, group in enumerate(groups):
            memory = _paged_memory(device) if demand_paged else None
            keys, values = (
                Store(
                    kind,
                    n_blocks=group.n_blocks,
                    block_size=block_size,
                    n_rows=sum(group.n_heads),
                    head_dim=head_dim,
                    allocate=partial(allocate_zeroed, device=device) if memory is None else memory.allocate,
                )
                for kind in (k_type, v_type)
            )
            own = ArenaGroup(keys, values, memory=memory, empty=set(range(group.n_blocks)))
            self._groups.append(own)
            row = 0
            for layer, n_heads in zip(group.layers, group.n_heads, strict=True):
                self._layers[layer] = ArenaLayer(keys, values, slice(row, row + n_heads), number)
                row += n_heads

    @property
    def n_bytes(self) -> int:
        return sum(self.group_bytes())

    def group_bytes(self) -> list[int]:
        """The allocated bytes of each group."""
        states = [] if self._states is None else [self._states.arena.n_bytes]
        return [group.n_bytes for group in self._groups] + states

    @property
    def n_resident(self) -> int:
        """Bytes in memory at this moment: all of them, unless the arena is demand-paged."""
        states = 0 if self._states is None else self._states.n_resident
        return states + sum(
            group.n_bytes if group.memory is None else group.memory.n_resident for group in self._groups
        )

    def layer(self, layer: int) -> ArenaLayer:
        """The memory of that layer's keys and values; always the same object."""
        return self._layers[layer]

    def state(self, name: str) -> StatePlanes:
        """The memory of the graph's input `name`, a part of a layer's state; always the same object."""
        return self.states.planes[name]

    @property
    def states(self) -> StateArena:
        assert self._states is not None, "no layer has a recurrent state"
        return self._states.arena

    def prepare(self, batch: Sequence[CacheBatch], copies: Iterable[BlockCopy]) -> None:
        """Before a batch runs: what it writes to is empty no more, its copies-on-write are made."""
        for own, group in self._of_groups(batch):
            if group.memory is not None:
                group.touch(own.slots)
        if self._states is not None:
            self._states.fill(_of_states(batch).targets)
        self._copy_blocks(copies)

    def fill(self, group: int, blocks: Iterable[int]) -> None:
        """These blocks of a group are about to hold something."""
        self._groups[group].fill(blocks)

    def _of_groups(self, batch: Sequence[CacheBatch]) -> Iterator[tuple[GroupBatch, ArenaGroup]]:
        for own, group in zip(batch, self._groups, strict=False):  # states are the last
            assert isinstance(own, GroupBatch)
            yield own, group

    def _copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            group = self._groups[copy.group]
            group.fill([copy.dst])
            for store in (group.keys, group.values):
                store.copy_block(copy.src, copy.dst, copy.n_tokens)

    def store_random(self, batch: Sequence[CacheBatch]) -> None:
        """Random keys and values at a batch's slots; all layers of a group get the same, packed once."""
        self.prepare(batch, [])
        if self._states is not None:
            self.states.store_random(_of_states(batch).targets)
        for number, (own, group) in enumerate(self._of_groups(batch)):
            slots = own.slots
            places = [layer.rows for layer in self._layers.values() if layer.group == number]
            widest = max(places, key=lambda rows: rows.stop - rows.start)
            for store in (group.keys, group.values):
                store.write(
                    widest, slots, torch.randn(len(slots), widest.stop - widest.start, store.head_dim)
                )
                packed = store.gather(widest, slots)
                for rows in places:
                    n_heads = rows.stop - rows.start
                    store.scatter(rows, slots, {name: plane[:, :n_heads] for name, plane in packed.items()})

    def shift(self, shifts: Iterable[BlockShift], rotate: KeyRotation) -> None:
        """Move K/V to earlier positions: values as they are, keys rotated to their new positions.

        A shift by no positions moves keys as they are, too, and does not call `rotate`.
        """
        for shift in shifts:
            if not shift.distance:
                self._move(shift)
                continue
            group = self._groups[shift.group]
            sources, targets = torch.tensor(shift.sources), torch.tensor(shift.targets)
            group.touch(targets)
            self._copy_blocks(shift.copies)
            for number, layer in self._layers.items():
                if layer.group == shift.group and layer.rows.start < layer.rows.stop and len(sources):
                    rotated = rotate(number, layer.keys.read(layer.rows, sources), -shift.distance)
                    layer.keys.write(layer.rows, targets, rotated)
                    layer.values.scatter(layer.rows, targets, layer.values.gather(layer.rows, sources))

    def _move(self, shift: BlockShift) -> None:
        """Copy K/V between slots, as they are stored; all layers of the group at once."""
        group = self._groups[shift.group]
        places = torch.tensor([shift.sources, shift.targets])
        group.touch(places[1])
        self._copy_blocks(shift.copies)
        for store in (group.keys, group.values):
            store.copy_slots(places)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[dict[str, torch.Tensor], ...]:
        """K and V of this device's heads as they are stored (see Store.gather), or its parts of the state in a slot."""
        if layer not in self._layers:
            return tuple({name: state} for name, state in self.states.gather(layer, int(slots)).items())
        own = self._layers[layer]
        return own.keys.gather(own.rows, slots), own.values.gather(own.rows, slots)

    def scatter(self, layer: int, slots: torch.Tensor, planes: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """The reverse of `gather`. The slots' blocks hold something from now on."""
        if layer not in self._layers and self._states is not None:
            self._states.fill([int(slots)])
            self.states.scatter(int(slots), {name: part for items in planes for name, part in items.items()})
            return
        own = self._layers[layer]
        self._groups[own.group].touch(slots)
        for store, items in zip((own.keys, own.values), planes, strict=True):
            store.scatter(own.rows, slots, items)

    def give_back(self, emptied: Sequence[Sequence[int]]) -> None:
        """Blocks of each group that hold nothing any more: return their memory, where it is demand-paged."""
        if self._states is not None:
            self._states.give_back(emptied[-1])
        for group, blocks in zip(self._groups, emptied, strict=False):  # states are the last
            if group.memory is not None and blocks:
                group.empty.update(blocks)
                group.memory.give_back(blocks, group.empty)


def _of_states(batch: Sequence[CacheBatch]) -> StateBatch:
    own = batch[-1]
    assert isinstance(own, StateBatch)
    return own


def _paged_memory(device: torch.device | None) -> PagedMemory | GpuPagedMemory:
    on_gpu = device is not None and device.type == "cuda"
    return GpuPagedMemory(cuda_driver(device)) if device is not None and on_gpu else PagedMemory()


@dataclass(frozen=True, eq=False)
class ArenaLayer:
    """The memory of one layer's keys and values: some rows of its group's stores."""

    keys: Store
    values: Store
    rows: slice
    group: int

    def on(self, batch: GroupBatch) -> BatchLayer:
        """The graph's cache input for a batch of the layer's group."""
        return BatchLayer(self, batch)


@dataclass(frozen=True, eq=False, slots=True)
class BatchLayer:
    """One layer of the cache, and where a batch writes and reads in it (graph.values.CacheLayer)."""

    layer: ArenaLayer
    batch: GroupBatch

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layer.keys.write(self.layer.rows, self.batch.slots, keys)
        self.layer.values.write(self.layer.rows, self.batch.slots, values)

    def sequences(self) -> Iterator[CachedSequence]:
        for table in self.batch.tables:
            yield ArenaSequence(self.layer, table)


class ArenaSequence:
    """One sequence's context in one layer (graph.values.CachedSequence)."""

    def __init__(self, layer: ArenaLayer, table: SequenceTable) -> None:
        self._layer = layer
        self._slots = table.slots(layer.keys.block_size)
        self.rows = torch.arange(table.first_row, table.first_row + table.n_rows)
        self.positions = torch.arange(table.position, table.position + table.n_rows)
        self.key_positions = torch.arange(table.first, table.first + table.n_context)
        self.seen = None
        if table.seen is not None:
            bits = np.arange(table.n_rows, dtype=np.uint64)
            self.seen = torch.from_numpy((table.seen[:, None] >> bits & np.uint64(1)).astype(bool))
            self.positions = table.position + self.seen.sum(1) - 1
            self.key_positions[-table.n_rows :] = self.positions

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._layer
        return layer.keys.read(layer.rows, self._slots), layer.values.read(layer.rows, self._slots)
