"""Where values come from: the batch, the model file, constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from motley.graph.tensor import Op, Shape, Tensor, Way


@dataclass(frozen=True)
class Input(Op):
    """A value that each batch brings: token ids, positions, a layer of the cache."""

    name: ClassVar[str] = "input"
    n_inputs: ClassVar[tuple[int, int]] = (0, 0)
    size: Shape
    kind: str

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        return Input(shape, self.kind)(name=name)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return self.size

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return self.kind


@dataclass(frozen=True)
class Weight(Op):
    """A tensor of the model file, packed in `format`; rows along the last axis are whole quant blocks.

    `source` is its name in the file. Two weights may have one source (tied embeddings): each may lie differently.
    `rows`, if given, are the ranges of the source's rows that it consists of, in order; they may repeat.
    """

    name: ClassVar[str] = "weight"
    n_inputs: ClassVar[tuple[int, int]] = (0, 0)
    size: Shape
    format: str
    source: str = ""
    rows: tuple[tuple[int, int], ...] = ()

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        return Weight(shape, self.format, self.source, self.rows)(name=name)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return self.size

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return self.format


@dataclass(frozen=True)
class Hadamard(Op):
    """The orthonormal Hadamard matrix of size `n`, a power of two: H = Hᵀ, H·H = 1."""

    name: ClassVar[str] = "hadamard"
    n_inputs: ClassVar[tuple[int, int]] = (0, 0)
    is_constant: ClassVar[bool] = True
    n: int

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        self.require(self.n > 0 and self.n & (self.n - 1) == 0, f"size {self.n} is no power of two")
        return (self.n, self.n)

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        matrix = torch.ones(1, 1)
        while matrix.shape[0] < self.n:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
        return matrix.div(self.n**0.5)
