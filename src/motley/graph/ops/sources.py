"""Source ops: values from the batch, from the model file, and constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from motley.graph.roles import EVERYWHERE, Role
from motley.graph.tensor import CACHE, Op, Shape, Tensor, Way


@dataclass(frozen=True)
class Input(Op):
    """A value given with each batch, such as token ids or positions. For a layer of the cache see `CacheInput`."""

    name: ClassVar[str] = "input"
    n_inputs: ClassVar[tuple[int, int]] = (0, 0)
    size: Shape
    kind: str

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        return replace(self, size=shape)(name=name)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return self.size

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return self.kind


@dataclass(frozen=True)
class CacheInput(Input):
    """One layer of the KV cache, of shape (KV heads, dim)."""

    layer: int

    @staticmethod
    def of(layer: int, shape: Shape) -> Tensor:
        return CacheInput(shape, CACHE, layer)(name=CacheInput.name_of(layer))

    @staticmethod
    def name_of(layer: int) -> str:
        """The input's name for a layer. Placements use it as their key."""
        return f"cache.{layer}"


def cache_layer(cache: Tensor) -> int:
    """The layer number of a cache input."""
    assert isinstance(cache.op, CacheInput), f"{cache!r} is no layer of the cache"
    return cache.op.layer


@dataclass(frozen=True)
class Weight(Op):
    """A tensor of the model file, packed in `format`; rows along the last axis are whole quant blocks.

    `source` is its name in the file. Two weights may have the same source (tied embeddings) and different states.
    `rows`, if given, are ranges of the source's rows, in order; the weight consists of these rows, and rows may repeat.
    `middle`, if given, is the range of the source's axis 1 that the weight consists of: of fused matrices of experts,
    the gates or the ups. `role` is its use in the model, which decides how it may be split.
    """

    name: ClassVar[str] = "weight"
    n_inputs: ClassVar[tuple[int, int]] = (0, 0)
    size: Shape
    format: str
    source: str = ""
    rows: tuple[tuple[int, int], ...] = ()
    role: Role = EVERYWHERE
    middle: tuple[int, int] | None = None

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        return replace(self, size=shape)(name=name)

    @property
    def contents(self) -> tuple[object, ...]:
        """The part of the file that the weight contains: weights with equal contents and states can share memory."""
        return self.source, self.rows, self.middle

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
