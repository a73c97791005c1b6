"""Choosing and placing rows by index."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from motley.formats import FORMATS, PackedTensor
from motley.graph.tensor import I32, Op, Sample, Shape, Tensor, Way, draw, draw_ids
from motley.graph.values import Value
from motley.ownership import MIRRORED, PARTIAL, Split, State, Word


@dataclass(frozen=True)
class LocalIds(Op):
    """Global ids of an axis → local ids of a device's part; -1 for ids that the device does not own.

    Ops that choose by id treat -1 as "not on this device": they return zeros or leave the row unchanged.
    """

    name: ClassVar[str] = "local_ids"
    word: Word
    device: int

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return inputs[0].shape

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return I32

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        (ids,) = inputs
        result, n_before = torch.full_like(ids, -1), 0
        for start, stop in self.word.global_ranges(self.device):
            is_inside = (ids >= start) & (ids < stop)
            result = torch.where(is_inside, ids - start + n_before, result)
            n_before += stop - start
        return result

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        word = Word.run([rng.randint(0, 4) for _ in range(3)]).power(2)
        yield Sample(LocalIds(word, rng.randrange(3)), (draw_ids(rng, 5, max(len(word), 1)),))


def mask_unowned(ids: Tensor, state: State, axis: int, device: int) -> Tensor:
    """`ids` as local ids of `device` if it has a part of the indexed tensor, cut along `axis`; otherwise `ids`."""
    if not isinstance(state, Split) or state.axis != axis:
        return ids
    has_all = list(state.word.global_ranges(device)) == [(0, len(state.word))]
    return ids if has_all else LocalIds(state.word, device)(ids)


@dataclass(frozen=True)
class GetRows(Op):
    """Rows `ids` (n,) of `table` (rows, …), which may be packed → (n, …). Zeros for an id of -1."""

    name: ClassVar[str] = "get_rows"
    n_inputs: ClassVar[tuple[int, int]] = (2, 2)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        table, ids = inputs
        self.require(
            len(table.shape) >= 1 and len(ids.shape) == 1, "needs a table and a list of ids", table, ids
        )
        self.require(ids.dtype == I32, "ids are not i32", table, ids)
        return (*ids.shape, *table.shape[1:])

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        table, ids = inputs
        assert isinstance(ids, torch.Tensor)
        is_here = ids >= 0
        index = ids[is_here].long()
        rows = table[index] if isinstance(table, torch.Tensor) else table.rows(index)
        result = rows.new_zeros(len(ids), *rows.shape[1:])
        result[is_here] = rows
        return result

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        table, ids = states
        if isinstance(table, Split) and table.axis == 0:
            yield Way((table, MIRRORED), PARTIAL)
        elif not isinstance(ids, Split):
            yield Way((table, MIRRORED), table)
        if isinstance(ids, Split):
            yield Way((MIRRORED, ids), ids)

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        table, ids = inputs
        return self(table, mask_unowned(ids, way.inputs[0], 0, device), name=name)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        rows = rng.randint(1, 9)
        yield Sample(GetRows(), (draw(rng, rows, 5), draw_ids(rng, rng.randint(0, 6), rows)))
        packed = PackedTensor(FORMATS["Q8_0"].pack(draw(rng, rows, 64)), FORMATS["Q8_0"])
        yield Sample(GetRows(), (packed, draw_ids(rng, 4, rows)))


@dataclass(frozen=True)
class SetRows(Op):
    """A copy of `table` (rows, …) with `rows` (n, …) at `ids` (n,); the last of equal ids wins, -1 is skipped."""

    name: ClassVar[str] = "set_rows"
    n_inputs: ClassVar[tuple[int, int]] = (3, 3)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        table, ids, rows = inputs
        self.require(len(ids.shape) == 1 and ids.dtype == I32, "ids are not a list of i32", table, ids, rows)
        self.require(
            rows.shape == (*ids.shape, *table.shape[1:]), "rows do not fit the table", table, ids, rows
        )
        return table.shape

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        table, ids, rows = inputs
        result = table.clone()
        for i, row in zip(ids.tolist(), rows, strict=True):
            if i >= 0:
                result[i] = row
        return result

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        for state in (states[0], states[2]):
            if isinstance(state, Split) and state.axis > 0:
                yield Way((state, MIRRORED, state), state)
        if isinstance(states[0], Split) and states[0].axis == 0:
            yield Way((states[0], MIRRORED, MIRRORED), states[0])
        if PARTIAL in (states[0], states[2]):
            yield Way((PARTIAL, MIRRORED, PARTIAL), PARTIAL)

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        table, ids, rows = inputs
        return self(table, mask_unowned(ids, way.inputs[0], 0, device), rows, name=name)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        n = rng.randint(0, 4)
        yield Sample(SetRows(), (draw(rng, 6, 5), draw_ids(rng, n, 6), draw(rng, n, 5)))
