"""Values of whole tensors, what each device has of them, and back.

Words are read letter by letter, as the owner oracle reads them: nothing here shares code with what it checks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from motley.formats import PackedTensor
from motley.graph import CACHE, F32, I32, Tensor
from motley.graph.ops import Input, Weight
from motley.graph.tensor import draw
from motley.graph.values import Value, dense
from motley.kvcache.arena import Arena, BatchLayer, GroupBatch, LayerGroup, SequenceTable
from motley.kvcache.types import get_cache_type
from motley.ownership import MIRRORED, PARTIAL, Split, State, Word

BLOCK_SIZE = 4  # tokens


def letters(word: Word) -> list[int]:
    """The word written out."""
    return [device for device, n in word.runs() for _ in range(n)]


def spell(string: Sequence[int]) -> Word:
    """A word made letter by letter."""
    return Word.concat(Word.of(device, 1) for device in string)


@dataclass(frozen=True, eq=False)
class CacheValue:
    """A layer of the cache before a batch: what its slots hold, and the batch that is about to come."""

    keys: torch.Tensor  # (slots, heads, dim)
    values: torch.Tensor
    batch: GroupBatch

    @staticmethod
    def random(rng: random.Random, n_tokens: int, n_heads: int, dim: int, max_before: int = 3) -> CacheValue:
        """A batch of one sequence or two that may have up to `max_before` tokens already."""
        first = rng.randint(1, n_tokens)
        tables, n_blocks = [], 0
        for rows in filter(None, (range(first), range(first, n_tokens))):
            n_before = rng.randint(0, max_before)
            n_own = -(-(n_before + len(rows)) // BLOCK_SIZE)
            blocks = np.arange(n_blocks, n_blocks + n_own, dtype=np.int32)
            tables.append(SequenceTable(rows[0], len(rows), n_before, 0, blocks))
            n_blocks += n_own
        keys, values = (draw(rng, n_blocks * BLOCK_SIZE, n_heads, dim) for _ in range(2))
        return CacheValue(keys, values, GroupBatch.of(tables, BLOCK_SIZE))

    @property
    def shape(self) -> tuple[int, int]:
        return self.keys.shape[1], self.keys.shape[2]

    def heads(self, index: Sequence[int]) -> CacheValue:
        return replace(self, keys=self.keys[:, list(index)], values=self.values[:, list(index)])

    def layer(self) -> BatchLayer:
        """The layer itself, in an arena of its own, with the batch."""
        (n_slots, n_heads, dim), kind = self.keys.shape, get_cache_type("f32")
        group = LayerGroup((0,), (n_heads,), -(-n_slots // BLOCK_SIZE))
        arena = Arena(kind, kind, [group], block_size=BLOCK_SIZE, head_dim=dim)
        layer = arena.layer(0)
        slots = torch.arange(n_slots)
        layer.keys.write(layer.rows, slots, self.keys)
        layer.values.write(layer.rows, slots, self.values)
        return layer.on(self.batch)


def contents(cache: BatchLayer) -> torch.Tensor:
    """All that a layer holds, heads first: (heads, keys and values, slots, dim)."""
    layer = cache.layer
    slots = torch.arange(layer.keys.planes["values"].shape[0] * BLOCK_SIZE)
    both = torch.stack([store.read(layer.rows, slots) for store in (layer.keys, layer.values)])
    return both.movedim(2, 0)


def source(value: Value | CacheValue, name: str) -> Tensor:
    """The graph's tensor for a value."""
    if isinstance(value, PackedTensor):
        return Weight(value.shape, value.format.name, name)(name=name)
    if isinstance(value, CacheValue):
        return Input(value.shape, CACHE)(name=name)
    return Input(tuple(value.shape), I32 if value.dtype == torch.int32 else F32)(name=name)


def parts(value: Any, state: State, n_devices: int, rng: random.Random) -> list[Any]:
    """What each device has of a value."""
    if state == MIRRORED:
        return [value] * n_devices
    if state == PARTIAL:
        return _addends(dense(value), n_devices, rng)
    assert isinstance(state, Split)
    owner = letters(state.word)
    return [
        _take(value, state.axis, [i for i, letter in enumerate(owner) if letter == device])
        for device in range(n_devices)
    ]


def joined(values: Sequence[torch.Tensor], state: State, shape: Sequence[int]) -> torch.Tensor:
    """The whole of what devices have; AssertionError if that is not what `state` says of a tensor of `shape`."""
    if state == MIRRORED:
        for value in values:
            assert value.equal(values[0]), "mirrored, but devices differ"
        return values[0]
    if state == PARTIAL:
        assert all(value.shape == tuple(shape) for value in values), "an addend is not of the whole's shape"
        return torch.stack(list(values)).sum(0)
    assert isinstance(state, Split)
    owner = torch.tensor(letters(state.word), dtype=torch.int64)
    whole = torch.full(tuple(shape), -7, dtype=values[0].dtype)
    for device, value in enumerate(values):
        index = (owner == device).nonzero().flatten()
        expected = (*shape[: state.axis], len(index), *shape[state.axis + 1 :])
        assert tuple(value.shape) == expected, f"device {device} has {tuple(value.shape)} of {state}"
        whole.index_copy_(state.axis, index, value)
    return whole


def _addends(value: torch.Tensor, n_devices: int, rng: random.Random) -> list[torch.Tensor]:
    addends = [draw(rng, *value.shape) for _ in range(n_devices - 1)]
    return [*addends, value - sum(addends, torch.zeros_like(value))]


def _take(value: Any, axis: int, index: list[int]) -> Any:
    if isinstance(value, CacheValue):
        assert axis == 0, "a cache layer is cut at heads"
        return value.heads(index)
    if isinstance(value, PackedTensor) and axis == len(value.shape) - 1:
        return _take_columns(value, index)
    if isinstance(value, PackedTensor):
        return PackedTensor(
            value.data.index_select(axis, torch.tensor(index, dtype=torch.int64)), value.format
        )
    return value.index_select(axis, torch.tensor(index, dtype=torch.int64))


def _take_columns(value: PackedTensor, index: list[int]) -> Value:
    """Columns of a packed matrix; unpacked where they are no whole blocks."""
    size, n_bytes = value.format.block_size, value.format.block_bytes
    blocks = sorted({i // size for i in index})
    if len(blocks) * size != len(index):
        return value.unpack().index_select(-1, torch.tensor(index, dtype=torch.int64))
    by_block = value.data.reshape(*value.data.shape[:-1], -1, n_bytes)
    data = by_block.index_select(-2, torch.tensor(blocks, dtype=torch.int64))
    return PackedTensor(data.flatten(-2), value.format)
