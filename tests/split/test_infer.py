"""Inference takes the fewest collectives, says where and why, and refuses what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from split_runner import check_split
from split_values import source, spell

from motley.errors import SplitError
from motley.formats import FORMATS, PackedTensor
from motley.graph import F32, I32, Graph, Tensor
from motley.graph.ops import Activation, Add, Concat, GetRows, Input, MatMul, RmsNorm, Scale, Softmax
from motley.ownership import MIRRORED, PARTIAL, Split, Word
from motley.split.infer import SplitGraph, infer
from motley.split.localize import localize

WORD = Word.run((3, 0, 1))


class Sources:
    """Tensors with random values, by name."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def input(self, name: str, *shape: int) -> Tensor:
        self.values[name] = torch.randn(shape, generator=torch.Generator().manual_seed(len(self.values)))
        return source(self.values[name], name)

    def weight(self, name: str, *shape: int, form: str = "F32") -> Tensor:
        self.input(name, *shape)
        self.values[name] = PackedTensor.pack(self.values[name], FORMATS[form])
        return source(self.values[name], name)


@pytest.fixture
def make() -> Sources:
    return Sources()


def kinds(split: SplitGraph) -> list[str]:
    return [t.kind for t in split.collectives]


def test_sums_wait_until_something_non_linear(make: Sources) -> None:
    x = make.input("x", 2, 4)
    parts = [MatMul()(x, make.weight(name, 5, 4)) for name in ("a", "b", "c")]
    total = Scale(0.5)(Add()(Add()(parts[0], parts[1]), parts[2]))
    graph = Graph.of(Activation("relu")(total))
    split = check_split(graph, make.values, 3, {name: Split(1, WORD) for name in ("a", "b", "c")})
    assert [(t.kind, t.tensor, t.user) for t in split.collectives] == [
        ("all_reduce", total, graph.outputs[0])
    ]


def test_a_gated_ffn_takes_one_sum_and_a_residual_none(make: Sources) -> None:
    x = make.input("x", 2, 6)
    hidden = Activation("silu")(MatMul()(x, make.weight("up", 4, 6)))
    y = Add()(x, MatMul()(hidden, make.weight("down", 6, 4)))
    graph = Graph.of(RmsNorm(0.1)(y, make.weight("norm", 6)))
    split = check_split(graph, make.values, 3, {"up": Split(0, WORD), "down": Split(1, WORD)})
    assert kinds(split) == ["all_reduce"]
    assert split.state(hidden) == Split(1, WORD)
    assert split.state(y) == PARTIAL  # the residual joins the sum instead of waiting for it


def test_what_was_brought_somewhere_once_stays_there(make: Sources) -> None:
    x = make.input("x", 4, 2)
    graph = Graph.of(Softmax()(x), Activation("relu")(x), RmsNorm(0.1)(x))
    split = check_split(graph, make.values, 2, {"x": Split(1, spell([1, 0]))})
    gathered = [t for t in split.collectives if t.tensor.name == "x"]
    assert len(gathered) == 1


def test_layers_on_different_devices_hand_over_once(make: Sources) -> None:
    x = make.input("x", 2, 4)
    first = Activation("relu")(MatMul()(x, make.weight("a", 4, 4)))
    graph = Graph.of(MatMul()(Add()(first, MatMul()(first, make.weight("b", 4, 4))), make.weight("c", 5, 4)))
    placement = {"a": Split(0, Word.of(2, 4)), "b": Split(0, Word.of(0, 4)), "c": Split(0, Word.of(0, 5))}
    split = check_split(graph, make.values, 3, placement)
    assert kinds(split) == ["send", "broadcast"]
    idle = localize(split, 1)  # it has no layers: all that it does is to hear the result
    assert [node.op.name for node in idle.graph.nodes] == ["broadcast"]
    assert not idle.layouts


def test_an_unplaced_weight_is_laid_out_as_its_user_needs_it(make: Sources) -> None:
    x, w, bias = make.input("x", 2, 4), make.weight("w", 4, 4), make.weight("bias", 4)
    split = check_split(Graph.of(Add()(MatMul()(x, w), bias)), make.values, 3, {"w": Split(0, WORD)})
    assert kinds(split) == ["all_gather"]
    shapes = [[t.shape for t in localize(split, device).graph.weights] for device in range(3)]
    assert shapes == [[(3, 4), (3,)], [(0, 4), (0,)], [(1, 4), (1,)]]


def test_a_packed_weight_is_not_cut_through_its_blocks(make: Sources) -> None:
    x = make.input("x", 2, 64)
    graph = Graph.of(MatMul()(x, make.weight("w", 4, 64, form="Q8_0")))
    blocks, odd = Split(1, Word.run((32, 32))), Split(1, Word.run((33, 31)))
    assert kinds(check_split(graph, make.values, 2, {"x": blocks})) == ["all_reduce"]
    assert kinds(check_split(graph, make.values, 2, {"x": odd})) == ["all_gather"]


def test_a_batch_that_wants_no_rows_works_in_layers(make: Sources) -> None:
    """A chunk of a prompt wants no logits: the tensors behind its output rows have no elements."""
    x, norm = make.input("x", 3, 4), make.weight("norm", 4)
    make.values["ids"] = torch.empty(0, dtype=torch.int32)
    rows = GetRows()(x, Input((0,), I32)(name="ids"))
    graph = Graph.of(MatMul()(RmsNorm(0.1)(rows, norm), make.weight("w", 5, 4)))
    on_1 = {"norm": Split(0, Word.of(1, 4)), "w": Split(0, Word.of(1, 5))}
    for placement in (on_1, {**on_1, "x": Split(0, Word.of(0, 3))}, {"x": Split(0, Word.of(1, 3))}):
        check_split(graph, make.values, 2, placement)


def test_many_inputs_in_many_states_are_no_explosion() -> None:
    inputs = [Input((4, 3), F32)(name=f"x{i}") for i in range(16)]
    graph = Graph.of(*(Softmax()(x) for x in inputs), joined := Concat(0)(*inputs))
    split = infer(graph, 2, {x.name: Split(1, Word.run((1, 2))) for x in inputs})
    assert split.state(joined) in (MIRRORED, Split(1, Word.run((1, 2))))


def test_a_weight_that_would_have_to_travel_is_refused_by_name(make: Sources) -> None:
    graph = Graph.of(RmsNorm(0.1)(make.input("x", 2, 4), make.weight("norm", 4), name="blk.0.norm"))
    with pytest.raises(SplitError, match=r"rms_norm: no way to compute blk\.0\.norm .*mirrored, split\[0\]"):
        infer(graph, 3, {"norm": Split(0, WORD)})


def test_a_placement_of_what_the_graph_has_not_is_refused(make: Sources) -> None:
    graph = Graph.of(Scale(2.0)(make.input("x", 2)))
    with pytest.raises(SplitError, match="'y' is no weight or input"):
        infer(graph, 2, {"y": MIRRORED})


@pytest.mark.parametrize(
    "state", [Split(1, Word.of(0, 4)), Split(0, Word.of(0, 5)), Split(0, Word.run((1, 1, 2)))]
)
def test_a_placement_that_does_not_fit_is_refused(make: Sources, state: Split) -> None:
    graph = Graph.of(Scale(2.0)(make.input("x", 4)))
    with pytest.raises(SplitError, match=r"x: is no split of \(4,\) over 2 devices"):
        infer(graph, 2, {"x": state})
