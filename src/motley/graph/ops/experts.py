"""Mixture of experts: the choice of each token's experts, their weights, and the FFN of the chosen experts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from motley.formats import FORMATS, Format, PackedTensor
from motley.graph.ops.matmul import cuts_whole_blocks
from motley.graph.ops.rows import mask_unowned
from motley.graph.tensor import I32, Op, Sample, Shape, Tensor, Way, draw, draw_ids, mirrored
from motley.graph.values import Value, dense
from motley.ownership import PARTIAL, Split, State, Word

SOFTMAX, SIGMOID = "softmax", "sigmoid"  # functions from a router's logits to scores
_TINY = 1e-20  # added to the sum of sigmoid scores before the division, as in transformers


@dataclass(frozen=True)
class Route(Op):
    """The experts of each token: logits (tokens, experts), n_used (tokens,) [, bias (experts,)] → ids (tokens, k).

    Best first, the lower id first among equals. A token uses its `n_used` best; the rest of its k ids are -1, which
    every op reads as "no expert". The bias only affects the choice. With groups, an expert can be chosen if its
    group is among the `n_groups_used` best; a group's score is the sum of its two best experts' scores.
    """

    name: ClassVar[str] = "route"
    n_inputs: ClassVar[tuple[int, int]] = (2, 3)
    k: int
    score: str = SOFTMAX
    n_groups: int = 1
    n_groups_used: int = 1

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        logits, n_used, *bias = inputs
        self.require(len(logits.shape) == 2, "logits are not (tokens, experts)", logits)
        n_tokens, n_experts = logits.shape
        self.require(1 <= self.k <= n_experts, f"cannot choose {self.k}", logits)
        has_counts = n_used.shape == (n_tokens,) and n_used.dtype == I32
        self.require(has_counts, "needs one i32 count for each token", logits, n_used)
        self.require(all(b.shape == (n_experts,) for b in bias), "needs one bias for each expert", *inputs)
        is_grouped = n_experts % self.n_groups == 0 and 1 <= self.n_groups_used <= self.n_groups
        self.require(is_grouped, f"no {self.n_groups_used} of {self.n_groups} groups", logits)
        self.require(self.score in (SOFTMAX, SIGMOID), f"no score {self.score!r}")
        return n_tokens, self.k

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return I32

    def needs_softmax(self, *, has_bias: bool) -> bool:
        """Whether the choice depends on the softmax's values: they have the order of the logits, but sums have not."""
        return self.score == SOFTMAX and (has_bias or self.n_groups_used < self.n_groups)

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        logits, n_used, *bias = map(dense, inputs)
        is_ordered = self.score == SOFTMAX and not self.needs_softmax(has_bias=bool(bias))
        scores = logits if is_ordered else _scores(logits, self.score)
        for value in bias:
            scores = scores + value
        scores = self._within_groups(scores)
        best = torch.sort(scores, dim=-1, descending=True, stable=True)
        ids = best.indices[:, : self.k].to(torch.int32)
        is_used = torch.arange(self.k, device=ids.device) < n_used[:, None]
        return torch.where(is_used & (best.values[:, : self.k] != -torch.inf), ids, -1)

    def _within_groups(self, scores: torch.Tensor) -> torch.Tensor:
        if self.n_groups_used == self.n_groups:
            return scores
        grouped = scores.reshape(len(scores), self.n_groups, scores.shape[1] // self.n_groups)
        n_best = min(2, grouped.shape[2])
        worth = grouped.topk(n_best, dim=-1).values.sum(-1)
        order = torch.sort(worth, dim=-1, descending=True, stable=True).indices
        is_out = torch.ones_like(worth, dtype=torch.bool).scatter(1, order[:, : self.n_groups_used], False)
        return grouped.masked_fill(is_out[:, :, None], -torch.inf).flatten(1)

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        for state in states[:2]:
            if isinstance(state, Split) and state.axis == 0:
                yield Way((state, state, *mirrored(len(inputs) - 2)), state)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        n, n_experts = rng.randint(1, 5), 8
        used = torch.tensor([rng.randint(0, 4) for _ in range(n)], dtype=torch.int32)
        logits = draw(rng, n, n_experts)
        yield Sample(Route(3), (logits, used))
        yield Sample(Route(n_experts), (logits, used + 4))
        bias = PackedTensor.pack(draw(rng, n_experts), FORMATS["F32"])
        yield Sample(Route(4, SIGMOID), (logits, used, bias))
        yield Sample(Route(2, SIGMOID, 4, 2), (logits, used, bias))


@dataclass(frozen=True)
class RouteWeights(Op):
    """The weight of each chosen expert: logits (tokens, experts), ids (tokens, k) → (tokens, k); 0 for an id of -1.

    `normalizes`: weights are divided by their sum over the chosen experts (of a softmax: the softmax over them).
    """

    name: ClassVar[str] = "route_weights"
    n_inputs: ClassVar[tuple[int, int]] = (2, 2)
    score: str = SOFTMAX
    normalizes: bool = True
    scale: float = 1.0

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        logits, ids = inputs
        is_paired = len(logits.shape) == len(ids.shape) == 2 and logits.shape[0] == ids.shape[0]
        self.require(is_paired and ids.dtype == I32, "needs (tokens, experts) and i32 ids", logits, ids)
        self.require(self.score in (SOFTMAX, SIGMOID), f"no score {self.score!r}")
        return ids.shape

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        logits, ids = inputs
        index, is_chosen = ids.clamp(min=0).long(), ids >= 0
        if self.score == SOFTMAX and self.normalizes:
            chosen = logits.gather(1, index).masked_fill(~is_chosen, -torch.inf)
            weights = torch.softmax(chosen, dim=-1).masked_fill(
                ~is_chosen, 0.0
            )  # a token without experts would give NaN
        else:
            weights = _scores(logits, self.score).gather(1, index).masked_fill(~is_chosen, 0.0)
            if self.normalizes:
                weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return weights * self.scale

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        for state in states:
            if isinstance(state, Split) and state.axis == 0:
                yield Way((state, state), state)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        logits = draw(rng, 3, 8)
        ids = torch.tensor([[5, 0, 7], [2, 3, -1], [-1, -1, -1]], dtype=torch.int32)
        for score in (SOFTMAX, SIGMOID):
            for normalizes in (True, False):
                yield Sample(RouteWeights(score, normalizes, rng.choice([1.0, 2.5])), (logits, ids))


def _scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    return torch.softmax(logits, dim=-1) if score == SOFTMAX else torch.sigmoid(logits)


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's gate: gate and up clamped to 7, a steeper sigmoid, and up + 1 instead of up."""
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "clamped_swiglu": _clamped_swiglu,
}


@dataclass(frozen=True)
class ExpertFfn(Op):
    """Σ over a token's experts e of weight · down[e](gate(x·gate[e]ᵀ, x·up[e]ᵀ)); ids of -1 add nothing.

    x (tokens, embd), ids and weights (tokens, k), gate and up (experts, ff, embd), down (experts, embd, ff), and
    optionally three biases (experts, ff), (experts, ff), (experts, embd). → (tokens, embd)

    There are two ways to split it, each with one sum over devices: each device has whole experts, or columns of every
    expert's hidden layer. With columns, one device holds the down biases; an empty down bias (0, embd) adds nothing.
    """

    name: ClassVar[str] = "expert_ffn"
    n_inputs: ClassVar[tuple[int, int]] = (6, 9)
    tolerance: ClassVar[float] = 1e-4
    function: str = "silu"

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        x, ids, weights, gate, up, down, *biases = inputs
        self.require(self.function in GATES, f"no function {self.function!r}; there are {', '.join(GATES)}")
        is_chosen = len(x.shape) == len(ids.shape) == 2 and ids.shape == weights.shape and ids.dtype == I32
        self.require(is_chosen and x.shape[0] == ids.shape[0], "ids or weights do not fit x", x, ids, weights)
        n_embd, is_expert = x.shape[1], len(gate.shape) == 3
        self.require(
            is_expert and gate.shape == up.shape and gate.shape[2] == n_embd,
            "gate and up are not (experts, ff, embd)",
            *inputs[3:6],
        )
        n_experts, n_ff, _ = gate.shape
        self.require(down.shape == (n_experts, n_embd, n_ff), "down is not (experts, embd, ff)", *inputs[3:6])
        self.require(len(biases) in (0, 3), "needs all three biases or none", *inputs)
        if biases:
            sizes = [(n_experts, n_ff)] * 2
            fits = [b.shape for b in biases[:2]] == sizes
            fits = fits and biases[2].shape in ((n_experts, n_embd), (0, n_embd))
            self.require(fits, "biases do not fit", *inputs[3:])
        return x.shape

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        x, ids, weights = map(dense, inputs[:3])
        biases = [dense(value) for value in inputs[6:]]
        out = torch.zeros_like(x)
        for expert in sorted(set(ids[ids >= 0].tolist())):
            rows, slots = torch.nonzero(ids == expert, as_tuple=True)
            gate, up, down = (_of_expert(value, expert) for value in inputs[3:6])
            hidden_gate, hidden_up = F.linear(x[rows], gate), F.linear(x[rows], up)
            if biases:
                hidden_gate, hidden_up = hidden_gate + biases[0][expert], hidden_up + biases[1][expert]
            change = F.linear(GATES[self.function](hidden_gate, hidden_up), down)
            if biases and len(biases[2]):
                change = change + biases[2][expert]
            out.index_add_(0, rows, weights[rows, slots][:, None] * change)
        return out

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        n_experts, has_biases = inputs[3].shape[0], len(inputs) > 6
        for state, columns in zip(states[3:6], (1, 1, 2), strict=True):
            if not isinstance(state, Split) or state.axis not in (0, columns):
                continue
            word = state.word
            if state.axis == 0:  # whole experts
                yield Way((*mirrored(3), *(Split(0, word),) * (len(inputs) - 3)), PARTIAL)
            elif cuts_whole_blocks(word, inputs[5]):
                biases = (Split(1, word), Split(1, word), Split(0, _of_first(word, n_experts)))
                cut = (Split(1, word), Split(1, word), Split(2, word), *(biases if has_biases else ()))
                yield Way((*mirrored(3), *cut), PARTIAL)
        for state in states[:3]:
            if isinstance(state, Split) and state.axis == 0:  # some of the tokens
                yield Way((state, state, state, *mirrored(len(inputs) - 3)), state)

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        x, ids, *rest = inputs
        return self(x, mask_unowned(ids, way.inputs[3], 0, device), *rest, name=name)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        n_experts, k = 5, 2
        for form in FORMATS.values():
            n_tokens = rng.randint(1, 9)
            n_embd, n_ff = (max(form.block_size, 32) * rng.randint(1, 2) for _ in range(2))
            scores = draw(rng, n_tokens, n_experts)
            weights = torch.softmax(scores, -1)[:, :k].contiguous()
            sizes = ((n_experts, n_ff, n_embd), (n_experts, n_ff, n_embd), (n_experts, n_embd, n_ff))
            matrices = [_some_experts(rng, form, *size) for size in sizes]
            chosen = (draw(rng, n_tokens, n_embd), torch.topk(scores, k).indices.int(), weights)
            yield Sample(ExpertFfn(), (*chosen, *matrices))
            chosen[1][0, 1] = -1
            widths = (n_ff, n_ff, n_embd)
            biases = [PackedTensor.pack(draw(rng, n_experts, n), FORMATS["F32"]) for n in widths]
            yield Sample(ExpertFfn("clamped_swiglu"), (*chosen, *matrices, *biases))


def _some_experts(rng: random.Random, form: Format, *size: int) -> PackedTensor:
    """Random experts whose rows are a few rows in random order: packing some formats takes long."""
    n_experts, n_rows, n_columns = size
    rows = form.pack(draw(rng, 16, n_columns) / n_columns**0.5)
    return PackedTensor(rows[draw_ids(rng, n_experts * n_rows, 16).view(n_experts, n_rows)], form)


def _of_first(word: Word, n: int) -> Word:
    """A word of length `n` that gives the whole axis to the first device of `word`."""
    return Word.of(word.letter(0) if len(word) else 0, n)


def _of_expert(value: Value, expert: int) -> torch.Tensor:
    """One expert's matrix."""
    if isinstance(value, torch.Tensor):
        return value[expert]
    return value.rows(torch.tensor([expert]))[0]
