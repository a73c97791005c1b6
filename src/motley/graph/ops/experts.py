"""Mixture of experts: choosing experts by token, and matrix products with the chosen ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from motley.graph.ops.matmul import cuts_whole_blocks
from motley.graph.ops.rows import only_own
from motley.graph.tensor import I32, Op, Sample, Shape, Tensor, Way, draw
from motley.graph.values import Value, dense
from motley.ownership import MIRRORED, PARTIAL, Partial, Split, State


@dataclass(frozen=True)
class TopK(Op):
    """Indices of the k largest along the last axis, largest first, the lower index first among equals."""

    name: ClassVar[str] = "top_k"
    k: int

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        (x,) = inputs
        self.require(1 <= self.k <= x.shape[-1], f"cannot choose {self.k}", x)
        return (*x.shape[:-1], self.k)

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return I32

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        order = torch.sort(inputs[0], dim=-1, descending=True, stable=True).indices
        return order[..., : self.k].to(torch.int32)

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        (x,) = states
        if isinstance(x, Split) and x.axis < len(inputs[0].shape) - 1:
            yield Way((x,), x)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        n = rng.randint(1, 16)
        yield Sample(TopK(rng.randint(1, n)), (draw(rng, rng.randint(1, 5), n),))


@dataclass(frozen=True)
class Gather(Op):
    """x (tokens, n) at ids (tokens, k) → (tokens, k). Zero for an id of -1."""

    name: ClassVar[str] = "gather"
    n_inputs: ClassVar[tuple[int, int]] = (2, 2)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        x, ids = inputs
        self.require(
            len(x.shape) == len(ids.shape) == 2 and ids.dtype == I32, "needs (tokens, n) and i32 ids", x, ids
        )
        self.require(x.shape[0] == ids.shape[0], "tokens differ", x, ids)
        return ids.shape

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        x, ids = inputs
        if not x.shape[1]:
            return torch.zeros(ids.shape)
        return torch.where(ids >= 0, torch.gather(x, 1, ids.clamp(min=0).long()), 0.0)

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        x, ids = states
        for state in (x, ids):
            if isinstance(state, Split) and state.axis == 0:
                yield Way((state, state), state)
        if isinstance(ids, Split) and ids.axis == 1:
            yield Way((MIRRORED, ids), ids)
        if isinstance(x, Partial) or (isinstance(x, Split) and x.axis == 1):
            yield Way((x, MIRRORED), PARTIAL)

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        x, ids = inputs
        return self(x, only_own(ids, way.inputs[0], 1, device), name=name)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        x = draw(rng, rng.randint(1, 5), 8)
        yield Sample(Gather(), (x, torch.topk(x, 3).indices.int()))


@dataclass(frozen=True)
class ExpertMatMul(Op):
    """For each token and chosen expert e: x·W[e]ᵀ; zeros for an id of -1.

    x (tokens, 1 or k, K), W (experts, N, K), ids (tokens, k) → (tokens, k, N).
    """

    name: ClassVar[str] = "expert_matmul"
    n_inputs: ClassVar[tuple[int, int]] = (3, 3)
    tolerance: ClassVar[float] = 1e-4

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        x, weight, ids = inputs
        self.require(
            len(x.shape) == len(weight.shape) == 3, "needs x (t, 1 or k, K) and W (experts, N, K)", *inputs
        )
        self.require(x.shape[2] == weight.shape[2], "the last axes differ", x, weight)
        is_paired = x.shape[0] == ids.shape[0] and x.shape[1] in (1, ids.shape[1])
        self.require(is_paired, "tokens or choices differ", *inputs)
        return (*ids.shape, weight.shape[1])

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        x, weight, ids = map(dense, inputs)
        if not weight.shape[0]:
            return torch.zeros(*ids.shape, weight.shape[1])
        chosen = weight[ids.clamp(min=0).long()]  # (tokens, k, N, K)
        products = torch.einsum("tkd,tknd->tkn", x.expand(-1, ids.shape[1], -1), chosen)
        return torch.where(ids[:, :, None] >= 0, products, 0.0)

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        x, weight, ids = states
        if isinstance(weight, Split):
            match weight.axis:
                case 0:  # whole experts
                    yield Way((MIRRORED, weight, MIRRORED), PARTIAL)
                case 1:  # a part of each expert's rows
                    yield Way((MIRRORED, weight, MIRRORED), Split(2, weight.word))
                case _:
                    yield Way((Split(2, weight.word), weight, MIRRORED), PARTIAL)
        if isinstance(x, Split) and x.axis == 2 and cuts_whole_blocks(x.word, inputs[1]):
            yield Way((x, x, MIRRORED), PARTIAL)
        for state in (x, ids):
            if isinstance(state, Split) and state.axis == 0:
                yield Way((state, MIRRORED, state), state)
        if isinstance(x, Partial):
            yield Way((PARTIAL, MIRRORED, MIRRORED), PARTIAL)

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        x, weight, ids = inputs
        return self(x, weight, only_own(ids, way.inputs[1], 0, device), name=name)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        ids = torch.topk(draw(rng, 3, 5), 2).indices.int()
        for choices in (1, 2):
            yield Sample(ExpertMatMul(), (draw(rng, 3, choices, 32), draw(rng, 5, 7, 32), ids))


@dataclass(frozen=True)
class Sum(Op):
    """Sum over one axis, which goes away."""

    name: ClassVar[str] = "sum"
    axis: int

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        (x,) = inputs
        self.require(0 <= self.axis < len(x.shape), f"no axis {self.axis}", x)
        return (*x.shape[: self.axis], *x.shape[self.axis + 1 :])

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return inputs[0].sum(self.axis)

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        (x,) = states
        if not isinstance(x, Split):
            yield Way((x,), x)
        elif x.axis == self.axis:
            yield Way((x,), PARTIAL)
        else:
            yield Way((x,), Split(x.axis - (x.axis > self.axis), x.word))

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        yield Sample(Sum(rng.randint(0, 2)), (draw(rng, 2, 3, 4),))
