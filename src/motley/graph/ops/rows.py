"""Choosing and placing rows by index."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from motley.formats import FORMATS, PackedTensor
from motley.graph.tensor import I32, Op, Sample, Shape, Tensor, draw, draw_ids
from motley.graph.values import Value


@dataclass(frozen=True)
class GetRows(Op):
    """Rows `ids` (n,) of `table` (rows, …), which may be packed → (n, …)."""

    name: ClassVar[str] = "get_rows"
    n_inputs: ClassVar[tuple[int, int]] = (2, 2)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        table, ids = inputs
        self.require(len(table.shape) >= 1 and len(ids.shape) == 1, "needs a table and a list of ids", table, ids)
        self.require(ids.dtype == I32, "ids are not i32", table, ids)
        return (*ids.shape, *table.shape[1:])

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        table, ids = inputs
        assert isinstance(ids, torch.Tensor)
        return table.rows(ids.long()) if isinstance(table, PackedTensor) else table[ids.long()]

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        rows = rng.randint(1, 9)
        yield Sample(GetRows(), (draw(rng, rows, 5), draw_ids(rng, rng.randint(0, 6), rows)))
        packed = PackedTensor(FORMATS["Q8_0"].pack(draw(rng, rows, 64)), FORMATS["Q8_0"])
        yield Sample(GetRows(), (packed, draw_ids(rng, 4, rows)))


@dataclass(frozen=True)
class SetRows(Op):
    """A copy of `table` (rows, …) with `rows` (n, …) at `ids` (n,); the last of equal ids wins."""

    name: ClassVar[str] = "set_rows"
    n_inputs: ClassVar[tuple[int, int]] = (3, 3)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        table, ids, rows = inputs
        self.require(len(ids.shape) == 1 and ids.dtype == I32, "ids are not a list of i32", table, ids, rows)
        self.require(rows.shape == (*ids.shape, *table.shape[1:]), "rows do not fit the table", table, ids, rows)
        return table.shape

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        table, ids, rows = inputs
        result = table.clone()
        for i, row in zip(ids.tolist(), rows, strict=True):
            result[i] = row
        return result

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        n = rng.randint(0, 4)
        yield Sample(SetRows(), (draw(rng, 6, 5), draw_ids(rng, n, 6), draw(rng, n, 5)))
