"""Every op's split rule: whatever way it offers to compute the op on parts gives the values of the whole."""

from __future__ import annotations

import random

import pytest
from rule_checks import check_rule
from rule_samples import sampled
from split_values import spell

from motley.graph import CACHE, F32, I32, Op, Tensor, Way
from motley.graph.ops import (
    OPS,
    Activation,
    Add,
    Attention,
    BatchMatMul,
    CacheStore,
    Concat,
    ExpertFfn,
    GetRows,
    Hadamard,
    Input,
    MatMul,
    Mul,
    Permute,
    Repeat,
    Reshape,
    RmsNorm,
    Rope,
    Route,
    RouteWeights,
    Scale,
    SetRows,
    Slice,
    Softmax,
    Weight,
)
from motley.ownership import MIRRORED, PARTIAL, Split, State, Word
from thorough import TRIES_ALL

# Ops with a recurrent state have a test of their own: tests/backends/cpu/test_recurrent.py.
SOURCES = {"input", "weight", "hadamard", "causal_conv", "delta_net"}
SEEDS = range(0, 7, 1 if TRIES_ALL else 2)  # seed n: on n + 1 devices


@pytest.mark.parametrize("name", sorted(set(OPS) - SOURCES))
def test_every_way_of_an_op_is_sound(name: str) -> None:
    for seed in SEEDS:
        for sample in sampled(name, seed):
            check_rule(sample, n_devices=seed + 1, rng=random.Random(seed))


@pytest.mark.parametrize("name", sorted(set(OPS) - SOURCES))
def test_every_op_is_sampled(name: str) -> None:
    assert sampled(name, 0), f"{name} has no samples: its split rule is tested by nobody"


@pytest.mark.parametrize("state", [MIRRORED, PARTIAL, Split(1, spell([1, 0, 1, 1])), Split(0, Word.of(0, 2))])
@pytest.mark.parametrize("op", [Input((2, 4), F32), Weight((2, 4), "F32", "w")])
def test_a_source_is_laid_out_as_it_is_placed(op: Op, state: State) -> None:
    for device in range(3):
        shape = state.local_shape((2, 4), device)
        part = op.local([], Way((), state), shape, device, "x")
        assert (part.shape, part.dtype, part.name) == (shape, op.dtype([]), "x")
        assert type(part.op) is type(op)


def test_constants_are_the_same_everywhere() -> None:
    part = Hadamard(8).local([], Way((), MIRRORED), (8, 8), 3, "h")
    assert part.op == Hadamard(8)


def x(*shape: int, kind: str = F32) -> Tensor:
    return Input(shape, kind)(name="x")


W, V = spell([0, 1, 1, 2]), spell([0, 1, 0, 1])
M, P, CACHE_2 = MIRRORED, PARTIAL, x(2, 8, kind=CACHE)


def on(axis: int, word: Word = W) -> Split:
    return Split(axis, word)


# x, ids, weights, gate, up, down: four experts with four columns each.
EXPERTS_OF_4 = [x(2, 3), x(2, 2, kind=I32), x(2, 2), x(4, 4, 3), x(4, 4, 3), x(4, 3, 4)]

# What a rule must offer, so that nobody gets soundness by offering nothing: op, inputs, their states → the first way.
EXPECTED: list[tuple[Op, list[Tensor], list[State], Way]] = [
    (MatMul(), [x(3, 4), x(4, 4)], [M, on(0)], Way((M, on(0)), on(1))),
    (MatMul(), [x(3, 4), x(5, 4)], [on(1), on(1)], Way((on(1), on(1)), P)),
    (MatMul(), [x(3, 4), x(5, 4)], [M, on(1)], Way((on(1), on(1)), P)),
    (MatMul(), [x(4, 2), x(5, 2)], [on(0), M], Way((on(0), M), on(0))),
    (MatMul(), [x(3, 4), x(5, 4)], [P, M], Way((P, M), P)),
    (BatchMatMul(), [x(4, 3, 5), x(4, 5, 2)], [on(0), on(0)], Way((on(0), on(0)), on(0))),
    (BatchMatMul(), [x(2, 3, 4), x(2, 4, 2)], [on(2), on(1)], Way((on(2), on(1)), P)),
    (Add(), [x(3, 4), x(3, 4)], [P, P], Way((P, P), P)),
    (Add(), [x(3, 4), x(3, 4)], [P, M], Way((P, P), P)),
    (Add(), [x(3, 4), x(4)], [on(1), M], Way((on(1), on(0)), on(1))),
    (Mul(), [x(3, 4), x(3, 1)], [on(1), M], Way((on(1), M), on(1))),
    (Mul(), [x(3, 4), x(3, 4)], [P, M], Way((P, M), P)),
    (Scale(2.0), [x(3)], [P], Way((P,), P)),
    (Activation("silu"), [x(3, 4)], [on(1)], Way((on(1),), on(1))),
    (Softmax(), [x(4, 3)], [on(0)], Way((on(0),), on(0))),
    (RmsNorm(0.1), [x(3, 4, 2), x(2)], [on(1), M], Way((on(1), M), on(1))),
    (Rope(2), [x(3, 4, 2), x(3, kind=I32)], [on(1), M], Way((on(1), M), on(1))),
    (CacheStore(), [CACHE_2, x(3, 2, 8), x(3, 2, 8)], [M, on(1, spell([1, 0])), M], Way(
        (on(0, spell([1, 0])), on(1, spell([1, 0])), on(1, spell([1, 0]))), on(0, spell([1, 0])))),
    (Attention(1.0), [x(3, 4, 8), CACHE_2], [M, on(0, spell([1, 0]))], Way(
        (on(1, spell([1, 1, 0, 0])), on(0, spell([1, 0]))), on(1, spell([1, 1, 0, 0])))),
    (Reshape((3, 8)), [x(3, 4, 2)], [on(1)], Way((on(1),), on(1, W.stretch(2)))),
    (Reshape((12,)), [x(3, 4)], [on(1)], Way((on(1),), on(0, W.power(3)))),
    (Permute((1, 0)), [x(3, 4)], [on(1)], Way((on(1),), on(0))),
    (Slice(0, 1, 3), [x(4, 2)], [on(0)], Way((on(0),), on(0, spell([1, 1])))),
    (Concat(0), [x(4), x(4)], [on(0), on(0, V)], Way((on(0), on(0, V)), on(0, W + V))),
    (Concat(1), [x(4, 2), x(4, 3)], [on(0), on(0)], Way((on(0), on(0)), on(0))),
    (Repeat(0, 2), [x(4)], [on(0)], Way((on(0),), on(0, W.stretch(2)))),
    (GetRows(), [x(4, 2), x(3, kind=I32)], [on(0), M], Way((on(0), M), P)),
    (GetRows(), [x(2, 4), x(3, kind=I32)], [on(1), M], Way((on(1), M), on(1))),
    (GetRows(), [x(2, 4), x(4, kind=I32)], [M, on(0)], Way((M, on(0)), on(0))),
    (SetRows(), [x(4, 2), x(3, kind=I32), x(3, 2)], [on(0), M, M], Way((on(0), M, M), on(0))),
    (Attention(1.0), [x(3, 4, 8), CACHE_2, x(4)], [M, on(0, spell([1, 0])), M], Way(
        (on(1, spell([1, 1, 0, 0])), on(0, spell([1, 0])), on(0, spell([1, 1, 0, 0]))), on(1, spell([1, 1, 0, 0])))),
    (Route(1), [x(4, 2), x(4, kind=I32)], [on(0), M], Way((on(0), on(0)), on(0))),
    (RouteWeights(), [x(4, 2), x(4, 1, kind=I32)], [M, on(0)], Way((on(0), on(0)), on(0))),
    (ExpertFfn(), EXPERTS_OF_4, [M, M, M, on(0), on(0), on(0)], Way((M, M, M, on(0), on(0), on(0)), P)),
    (ExpertFfn(), EXPERTS_OF_4, [M, M, M, on(1), on(1), on(2)], Way((M, M, M, on(1), on(1), on(2)), P)),
    (ExpertFfn(), [*EXPERTS_OF_4, x(4, 4), x(4, 4), x(4, 3)], [M, M, M, on(1), on(1), on(2), M, M, M], Way(
        (M, M, M, on(1), on(1), on(2), on(1), on(1), on(0, spell([W.letter(0)] * 4))), P)),
    (ExpertFfn(), [x(4, 3), x(4, 2, kind=I32), x(4, 2), *EXPERTS_OF_4[3:]], [on(0), M, M, M, M, M], Way(
        (on(0), on(0), on(0), M, M, M), on(0))),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "states", "way"), EXPECTED, ids=lambda v: getattr(v, "name", ""))
def test_a_rule_offers_its_best_way_first(
    op: Op, inputs: list[Tensor], states: list[State], way: Way
) -> None:
    assert next(iter(op.ways(inputs, states)), None) == way


def test_every_op_with_inputs_has_an_expected_way() -> None:
    assert {op.name for op, *_ in EXPECTED} | {"local_ids"} == set(OPS) - SOURCES


# Non-linear, or along the axis that is cut: there is no way but to make the input whole.
REFUSED: list[tuple[Op, list[Tensor], list[State]]] = [
    (Activation("relu"), [x(3, 4)], [P]),
    (Softmax(), [x(3, 4)], [P]),
    (Softmax(), [x(3, 4)], [on(1)]),
    (RmsNorm(0.1), [x(3, 4)], [on(1)]),
    (RmsNorm(0.1), [x(3, 4)], [P]),
    (Mul(), [x(3, 4), x(3, 4)], [P, P]),
    (MatMul(), [x(3, 4), x(5, 4)], [M, P]),
    (BatchMatMul(), [x(2, 3, 4), x(2, 4, 2)], [P, P]),
    (Route(2), [x(3, 4), x(3, kind=I32)], [on(1), M]),
    (Route(2), [x(3, 4), x(3, kind=I32)], [P, M]),
    (RouteWeights(), [x(3, 4), x(3, 2, kind=I32)], [P, M]),
    (ExpertFfn(), EXPERTS_OF_4, [P, M, M, M, M, M]),
    (ExpertFfn(), EXPERTS_OF_4, [on(1, spell([0, 1, 1])), M, M, M, M, M]),
    (Rope(4), [x(3, 2, 4), x(3, kind=I32)], [on(2), M]),
    (Attention(1.0), [x(3, 2, 8), CACHE_2], [on(1, spell([0, 1])), M]),
    (Reshape((4, 3)), [x(3, 4)], [on(1)]),
]


@pytest.mark.parametrize(("op", "inputs", "states"), REFUSED, ids=lambda v: getattr(v, "name", ""))
def test_a_rule_offers_nothing_where_there_is_nothing(
    op: Op, inputs: list[Tensor], states: list[State]
) -> None:
    assert list(op.ways(inputs, states)) == []
