"""Every op: its shape rule agrees with its reference, and wrong inputs are refused."""

from __future__ import annotations

import random

import pytest
import torch

from motley.errors import GraphError
from motley.formats import PackedTensor
from motley.graph import CACHE, F32, I32, Graph, Tensor
from motley.graph.ops import (
    HALVES,
    INTERLEAVED,
    OPS,
    Activation,
    Add,
    Attention,
    Hadamard,
    Input,
    MatMul,
    Reshape,
    RmsNorm,
    Rope,
    Route,
    RouteWeights,
    Weight,
    Yarn,
)

# Ops whose references need more than tensors; they have tests of their own.
WITHOUT_SAMPLES = {"input", "weight", "hadamard", "cache_store", "attention", "causal_conv", "delta_net"}


def node_for(value: torch.Tensor | PackedTensor, name: str) -> Tensor:
    if isinstance(value, PackedTensor):
        return Weight(value.shape, value.format.name)(name=name)
    return Input(tuple(value.shape), I32 if value.dtype == torch.int32 else F32)(name=name)


def samples(name: str, seed: int):
    cls = OPS[name]
    prototype = cls.__new__(cls)  # `samples` uses no attribute of its instance
    return list(prototype.samples(random.Random(seed)))


@pytest.mark.parametrize("name", sorted(set(OPS) - WITHOUT_SAMPLES))
def test_shape_rule_agrees_with_reference(name: str) -> None:
    for seed in range(5):
        drawn = samples(name, seed)
        assert drawn, "an op without samples is not tested by anybody"
        for sample in drawn:
            node = sample.op(*(node_for(v, f"x{i}") for i, v in enumerate(sample.inputs)))
            result = sample.op.reference(sample.inputs)
            assert tuple(result.shape) == node.shape
            assert result.dtype == (torch.int32 if node.dtype == I32 else torch.float32)


def test_a_nan_in_a_router_is_not_lost() -> None:
    """It is chosen, and the token's weights show it; a token without experts has weights of 0."""
    logits = torch.tensor([[1.0, float("nan"), 0.5], [1.0, 2.0, 0.5]])
    ids = Route(2).reference([logits, torch.tensor([2, 0], dtype=torch.int32)])
    weights = RouteWeights().reference([logits, ids])
    assert 1 in ids[0]
    assert weights[0].isnan().any()
    assert not weights[1].any()


def test_every_op_is_named_after_its_key() -> None:
    assert all(op.name == key for key, op in OPS.items())


def test_hadamard_is_orthonormal_and_its_own_inverse() -> None:
    for n in (1, 2, 32, 128):
        h = Hadamard(n).reference([])
        torch.testing.assert_close(h @ h, torch.eye(n))


def test_hadamard_refuses_what_is_no_power_of_two() -> None:
    with pytest.raises(GraphError, match="48"):
        Hadamard(48)()


@pytest.mark.parametrize("style", [INTERLEAVED, HALVES])
def test_rope_keeps_lengths_and_relative_angles(style: str) -> None:
    rope = Rope(64, style=style)
    x = torch.randn(1, 1, 64)
    y = torch.randn(1, 1, 64)

    def at(value: torch.Tensor, position: int) -> torch.Tensor:
        return rope.reference([value, torch.tensor([position], dtype=torch.int32)]).flatten()

    torch.testing.assert_close(at(x, 77).norm(), x.norm())
    torch.testing.assert_close(at(x, 5) @ at(y, 9), at(x, 105) @ at(y, 109), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(at(x, 0), x.flatten())


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    plain, scaled = Rope(64).frequencies(), Rope(64, frequency_scale=0.25, yarn=Yarn(2048)).frequencies()
    assert scaled[0] == plain[0]
    torch.testing.assert_close(scaled[-1], plain[-1] / 4)


def test_wrong_inputs_are_refused_with_shapes() -> None:
    x = Input((3, 8), F32)(name="x")
    with pytest.raises(GraphError, match=r"last axes differ.*x\(3, 8\)"):
        MatMul()(x, Weight((4, 16), "F32")(name="w"))
    with pytest.raises(GraphError, match="2 to 2 inputs, got 1"):
        Add()(x)
    with pytest.raises(GraphError, match="no function 'swish'"):
        Activation("swish")(x)
    with pytest.raises(GraphError, match="cannot become"):
        Reshape((5, 5))(x)
    with pytest.raises(GraphError, match="no multiple of KV heads"):
        Attention(1.0)(Input((2, 3, 8), F32)(name="q"), Input((2, 8), CACHE)(name="c"))


def test_graph_prints_names_shapes_and_attributes() -> None:
    x = Input((3, 8), F32)(name="x")
    text = str(Graph.of(RmsNorm(1e-5)(x, Weight((8,), "F32")(name="norm.weight"), name="norm")))
    assert "rms_norm(x, norm.weight) {eps=1e-05}" in text
    assert "3×8" in text


def test_graph_lists_each_tensor_once_and_inputs_first() -> None:
    x = Input((2, 2), F32)(name="x")
    y = Add()(x, x)
    z = Add()(y, x)
    graph = Graph.of(z, y)
    assert graph.nodes == (x, y, z)
    assert graph.outputs == (z, y)
    assert graph.inputs == (x,)


def test_verifier_finds_wrong_order_shape_and_names() -> None:
    x = Input((2, 2), F32)(name="x")
    y = Add()(x, x)
    with pytest.raises(GraphError, match="before its input"):
        Graph((y, x), (y,)).verify()
    wrong = Tensor(Add(), (x, x), (5, 5), F32)
    with pytest.raises(GraphError, match="by the rule of add"):
        Graph((x, wrong), (wrong,)).verify()
    with pytest.raises(GraphError, match="two inputs or weights are called 'x'"):
        Graph.of(Add()(x, Input((2, 2), F32)(name="x")))
    with pytest.raises(GraphError, match="not among the nodes"):
        Graph((x,), (y,)).verify()


def test_deep_graphs_do_not_recurse() -> None:
    x = Input((1,), F32)(name="x")
    for _ in range(5000):
        x = Add()(x, x)
    assert len(Graph.of(x).nodes) == 5001
