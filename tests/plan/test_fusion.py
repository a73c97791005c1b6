"""Fusion: stages compute what their graph does, whichever of them a backend takes, and hide nothing that is read."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.graph import CACHE, F32, I32, Graph, Tensor
from motley.graph.ops import (
    HALVES,
    Activation,
    Add,
    Attention,
    CacheStore,
    ExpertFfn,
    GetRows,
    Hadamard,
    Input,
    MatMul,
    Mul,
    Reshape,
    RmsNorm,
    Rope,
    Route,
    RouteWeights,
    Scale,
    Weight,
)
from motley.plan import (
    AttentionBlock,
    Experts,
    Gate,
    Linear,
    Norm,
    Part,
    Routing,
    Single,
    Stage,
    fuse,
    is_given,
    is_view,
)
from motley.split.collectives import AllReduce
from thorough import examples

ROWS, WIDTH, DIM = 4, 32, 16
HADAMARD = Hadamard(8)(name="h")
POSITIONS = Input((ROWS,), I32)(name="positions")
IDS = Input((ROWS,), I32)(name="ids")


def anything(stage: Stage) -> bool:
    return True


def weight(name: str, *shape: int) -> Tensor:
    return Weight(shape or (WIDTH, WIDTH), "F32", name)(name=name)


def rotate(x: Tensor) -> Tensor:
    return Reshape(x.shape)(MatMul()(Reshape((x.n_values // 8, 8))(x), HADAMARD))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    tensors = [Input((ROWS, WIDTH), F32)(name="x")]
    for i in range(draw(st.integers(1, 20))):
        recent = tensors[-4:]
        a, b = draw(st.sampled_from(recent)), draw(st.sampled_from(recent))
        match draw(st.sampled_from(["matmul"] * 4 + ["bias", "add", "mul", "act", "norm", "rows", "rope"])):
            case "matmul":
                made = MatMul()(a, weight(f"w{i}"))
            case "bias":
                made = Add()(a, weight(f"b{i}", WIDTH))
            case "add":
                made = Add()(a, b)
            case "mul":
                made = Mul()(a, b)
            case "act":
                made = Activation("silu")(a)
            case "norm":
                made = RmsNorm(1e-5)(a, weight(f"n{i}", WIDTH))
            case "rows":
                made = GetRows()(a, IDS)
            case _:
                heads = Rope(DIM, style=HALVES)(Reshape((ROWS, WIDTH // DIM, DIM))(a), POSITIONS)
                made = Reshape((ROWS, WIDTH))(rotate(heads) if draw(st.booleans()) else heads)
        tensors.append(made)
    return Graph.of(*draw(st.lists(st.sampled_from(tensors[1:]), min_size=1, max_size=3, unique=True)))


def value(tensor: Tensor, values: dict[Tensor, Any]) -> Any:
    if is_view(tensor):
        return value(tensor.inputs[0], values).reshape(tensor.shape)
    return values[tensor]


def compute(stage: Stage, values: dict[Tensor, Any]) -> dict[Tensor, Any]:
    """What the stage's own description says, and nothing but that."""

    def get(tensor: Tensor) -> Any:
        return value(tensor, values)

    match stage:
        case Linear():
            products = [get(stage.x) @ get(part.weight).T for part in stage.parts]
            for i, part in enumerate(stage.parts):
                for extra in (part.bias, part.residual):
                    products[i] = products[i] if extra is None else products[i] + get(extra)
            if stage.gate:
                products = [Activation(stage.gate).reference([products[0]]) * products[1]]
            return dict(zip(stage.outputs, products, strict=True))
        case Gate():
            return {stage.out: Activation(stage.function).reference([get(stage.gate)]) * get(stage.up)}
        case Norm():
            x = get(stage.x) if stage.rows is None else get(stage.x)[get(stage.rows).long()]
            return {stage.out: RmsNorm(stage.eps).reference([x, *map(get, filter(None, [stage.weight]))])}
        case Single():
            result = stage.node.op.reference([get(t) for t in stage.inputs])
            if stage.rotation:
                result = torch.unflatten(result, -1, (-1, stage.rotation)) @ HADAMARD.op.reference([])
            return {stage.out: result.reshape(stage.out.shape)}
        case _:
            raise AssertionError(stage)


@settings(max_examples=examples(300), deadline=None)
@given(
    graphs(), st.sets(st.sampled_from(["Linear", "gate", "Gate", "Norm", "rows", "Single", "bias", "joined"]))
)
def test_stages_compute_what_the_graph_does(graph: Graph, refused: set[str]) -> None:
    """`refused`: stages, or extras of a stage, that this backend does not take."""

    def takes(stage: Stage) -> bool:
        extras = {type(stage).__name__}
        if isinstance(stage, Linear):
            extras |= {"gate"} if stage.gate else set()
            extras |= {"bias"} if any(part.bias is not None for part in stage.parts) else set()
            extras |= {"joined"} if len(stage.parts) > 1 else set()
        if isinstance(stage, Norm) and stage.rows is not None:
            extras.add("rows")
        return not extras & refused

    generator = torch.Generator().manual_seed(1)
    given_values: dict[Tensor, Any] = {
        node: torch.arange(ROWS, dtype=torch.int32).flip(0)
        if node.dtype == I32
        else torch.randn(node.shape, generator=generator) * 0.3
        for node in graph.nodes
        if is_given(node) and node is not HADAMARD
    }
    given_values[HADAMARD] = HADAMARD.op.reference([])
    expected = dict(given_values)
    for node in graph.nodes:
        if node not in expected:
            expected[node] = node.op.reference([expected[t] for t in node.inputs])
    values = dict(given_values)
    for stage in fuse(graph, takes):
        assert not values.keys() & set(stage.outputs), "made twice"
        values |= compute(stage, values)  # KeyError, if an input is not known yet
    for out in graph.outputs:
        torch.testing.assert_close(value(out, values), expected[out], rtol=1e-3, atol=1e-4)


def test_products_of_one_input_go_together_each_with_what_is_added_to_it() -> None:
    x = Input((ROWS, WIDTH), F32)(name="x")
    q, k = MatMul()(x, weight("q")), MatMul()(x, weight("k"))
    biased, summed = Add()(q, weight("b", WIDTH)), Add()(x, k)
    (stage,) = fuse(Graph.of(biased, summed), anything)
    first = Part(q.inputs[1], biased, bias=biased.inputs[1])
    assert stage == Linear(x, (first, Part(k.inputs[1], summed, residual=x)))


def test_a_backend_without_bias_keeps_the_product_and_adds_by_itself() -> None:
    x = Input((ROWS, WIDTH), F32)(name="x")
    product = MatMul()(x, weight("w"))
    graph = Graph.of(Add()(product, weight("b", WIDTH)))

    def takes(stage: Stage) -> bool:
        return isinstance(stage, Linear) and all(part.bias is None for part in stage.parts)

    assert fuse(graph, takes) == (Linear(x, (Part(product.inputs[1], product),)), Single.of(graph.outputs[0]))


def test_what_somebody_else_reads_is_not_hidden() -> None:
    x = Input((ROWS, WIDTH), F32)(name="x")
    product = MatMul()(x, weight("w"))
    total = Add()(product, x)
    assert [stage.outputs for stage in fuse(Graph.of(total, product), anything)] == [(product,), (total,)]


def test_a_product_is_no_residual_of_its_sibling() -> None:
    """Both would be made at the same time."""
    x = Input((ROWS, WIDTH), F32)(name="x")
    first, second = MatMul()(x, weight("a")), MatMul()(x, weight("b"))
    total = Add()(first, second)
    stages = fuse(Graph.of(total), anything)
    assert [stage.outputs for stage in stages] == [(second,), (total,)]


def attention(*, between: bool = False) -> tuple[Graph, Tensor]:
    cache, v = Input((2, DIM), CACHE)(name="cache"), Input((ROWS, 2, DIM), F32)(name="v")
    q, k = (Rope(DIM)(Input((ROWS, 2, DIM), F32)(name=name), POSITIONS) for name in "qk")
    q = Scale(2.0)(q) if between else q
    stored = CacheStore()(cache, rotate(k), rotate(v))
    attended = Attention(1.0)(rotate(q), stored)
    return Graph.of(Reshape((ROWS, 2 * DIM))(rotate(attended))), attended


def test_an_attention_with_all_around_it_is_one_stage_where_it_is_taken() -> None:
    graph, _ = attention()
    (stage,) = fuse(graph, anything)
    assert isinstance(stage, AttentionBlock)
    assert [part.rotation for part in (stage.q, stage.k, stage.store, stage.attention)] == [8] * 4
    assert {t.name for t in stage.inputs} == {"q", "k", "v", "cache", "positions"}


def test_an_attention_of_another_kind_comes_in_pieces() -> None:
    for between, refused in ((True, ()), (False, AttentionBlock)):
        graph, attended = attention(between=between)
        stages = fuse(graph, lambda stage, refused=refused: not isinstance(stage, refused))  # type: ignore[misc]
        assert all(isinstance(stage, Single) for stage in stages)
        (last,) = [stage for stage in stages if isinstance(stage, Single) and stage.node is attended]
        assert last.rotation == 8


def test_collectives_stay_in_the_order_of_the_graph() -> None:
    x = Input((ROWS, WIDTH), F32)(name="x")
    one, two = MatMul()(x, weight("a")), MatMul()(x, weight("b"))
    met = [AllReduce()(one), AllReduce()(Activation("silu")(two)), AllReduce()(Scale(2.0)(one))]
    stages = fuse(Graph.of(*met), anything)
    assert [s.node for s in stages if isinstance(s, Single) and isinstance(s.node.op, AllReduce)] == met


def test_a_router_with_its_norm_and_experts_with_their_residual_become_stages() -> None:
    x = Input((3, 8), F32)(name="x")
    counts = Input((3,), I32)(name="n_used")
    normed = RmsNorm(1e-5)(x, Weight((8,), "F32", "norm")(name="norm"))
    logits = MatMul()(normed, Weight((4, 8), "F32", "router")(name="router"))
    ids = Route(2)(logits, counts)
    weights = RouteWeights()(logits, ids)
    matrices = [
        Weight(shape, "F32", name)(name=name)
        for name, shape in (("gate", (4, 6, 8)), ("up", (4, 6, 8)), ("down", (4, 8, 6)))
    ]
    out = Add()(x, ExpertFfn("silu")(normed, ids, weights, *matrices))
    stages = fuse(Graph.of(out), lambda stage: True)
    assert [type(stage) for stage in stages] == [Routing, Experts]
    assert stages[0].outputs == (normed, ids, weights)
    assert stages[1].inputs[-1] is x
    # A value that another node reads cannot be inside a stage: the graph's output `logits` prevents this one.
    stages = fuse(Graph.of(out, logits), lambda stage: True)
    assert [type(stage) for stage in stages] == [Norm, Linear, Single, Single, Experts]
