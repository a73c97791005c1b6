"""Recurrent layers on the GPU's kernels, under Triton's interpreter: pending tokens, slots, rings, padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from motley.backends import ReferenceBackend
from motley.backends.base import Backend
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.kernels.causal_conv import causal_conv
from motley.backends.cuda.kernels.delta_net import delta_net
from motley.formats import PackedTensor, get_format
from motley.graph import F32, Graph, Tensor
from motley.graph.ops import (
    CONVOLUTION,
    DELTA,
    Activation,
    Add,
    CausalConv,
    DeltaNet,
    Input,
    Mul,
    Reshape,
    RmsNorm,
    StateInput,
    Weight,
)
from motley.kvcache.state_arena import StateBatch, StatePlanes, StateSpan
from motley.plan import DeltaRule, DevicePlan, GatedNorm

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

SLOTS, RINGS, PENDING, TAPS = 4, 3, 6, 4
# A new sequence; one that continues in its own slot; one with pending tokens that moves to another slot and ring and
# leaves some of its rows pending; one whose ring is full before and after.
SPANS = (
    StateSpan(0, 5, 0, -1, 0, -1, 0, 5, -1),
    StateSpan(5, 1, 9, 1, 9, -1, 1, 10, -1),
    StateSpan(6, 3, 20, 2, 18, 0, 3, 21, 1),
    StateSpan(9, 6, 31, 1, 25, 2, 2, 31, 2),
)
N_ROWS = 15


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def planes(
    shape: tuple[int, ...],
    pending: tuple[int, ...],
    kind: torch.dtype = torch.float32,
    n_pending: int = PENDING,
) -> StatePlanes:
    rings = normal(RINGS, n_pending, *pending, seed=8)
    if len(shape) == 3:  # keys have length one, decays are negative
        dim = shape[1]
        rings[..., :dim] /= rings[..., :dim].norm(dim=-1, keepdim=True)
        rings[..., -2] = -rings[..., -2].abs()
        rings[..., -1] = rings[..., -1].sigmoid()
    return StatePlanes(normal(SLOTS, *shape, seed=7).to(kind), rings, 0, 0)


def twins(own: StatePlanes) -> StatePlanes:
    return replace(own, states=own.states.clone(), rings=own.rings.clone())


def table(batch: StateBatch, n_padding: int = 2) -> torch.Tensor:
    spans = torch.from_numpy(batch.table).int()
    return torch.cat([spans, torch.zeros(n_padding, 9, dtype=torch.int32)])


def batches() -> list[StateBatch]:
    """The sequences one by one, and those together that do not read what another one writes."""
    return [*(StateBatch((span,)) for span in SPANS), StateBatch((SPANS[0], SPANS[2]))]


def is_row(batch: StateBatch) -> torch.Tensor:
    found = torch.zeros(N_ROWS, dtype=torch.bool)
    for span in batch.spans:
        found[span.first_row : span.first_row + span.n_rows] = True
    return found


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_convolution_is_the_references(kind: torch.dtype) -> None:
    channels = 72
    x, weight = normal(N_ROWS, channels, seed=1), normal(channels, TAPS, seed=2)
    for batch in batches():
        ours = planes((TAPS - 1, channels), (channels,), kind)
        theirs = twins(ours)
        expected = CausalConv().reference([x, weight, theirs.on(batch)])
        got = causal_conv(x, weight, ours.states, ours.rings, table(batch))
        rows = is_row(batch)
        torch.testing.assert_close(got[rows], expected[rows])
        # The interpreter cuts bfloat16 off, a GPU rounds.
        torch.testing.assert_close(
            ours.states, theirs.states, atol=0, rtol=0 if kind == torch.float32 else 8e-3
        )
        assert torch.equal(ours.rings, theirs.rings)


@pytest.mark.parametrize(("heads", "keys", "is_cyclic"), [(4, 2, False), (4, 2, True), (3, 3, False)])
def test_the_delta_rule_is_the_references(heads: int, keys: int, is_cyclic: bool) -> None:
    key_dim, value_dim = 16, 12
    mixed = normal(N_ROWS, 2 * keys * key_dim + heads * value_dim, seed=1)
    decay, beta = -normal(N_ROWS, heads, seed=2).abs(), normal(N_ROWS, heads, seed=3).sigmoid()
    op = DeltaNet(is_cyclic=is_cyclic)
    for batch in batches():
        ours = planes((heads, key_dim, value_dim), (heads, key_dim + value_dim + 2))
        theirs = twins(ours)
        expected = op.reference([mixed, decay, beta, theirs.on(batch)])
        got = delta_net(
            mixed, (decay, beta), ours.states, ours.rings, table(batch), eps=op.eps, is_cyclic=is_cyclic
        )
        rows = is_row(batch)
        torch.testing.assert_close(got[rows], expected[rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.states, theirs.states, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.rings, theirs.rings, atol=1e-6, rtol=1e-6)


# Of prompts: a new one; one that ends with a chunk; one row more; decode steps beside a prompt; pending tokens before,
# rows that stay pending after it; all rows stay pending.
PROMPTS = {
    "new": ((0, 65, 0, -1, 0, -1, 0, 65, -1),),
    "whole chunks": ((0, 128, 5, 1, 5, -1, 1, 133, -1),),
    "continues": ((0, 17, 40, 2, 40, -1, 2, 57, -1),),
    "beside others": (
        (0, 1, 9, 1, 9, -1, 1, 10, -1),
        (1, 70, 64, 2, 64, -1, 3, 134, -1),
        (71, 3, 20, 0, 18, 0, 0, 21, 1),
    ),
    "pending": ((0, 75, 31, 1, 26, 2, 2, 101, 2),),
    "nothing is folded": ((0, 20, 31, 1, 31, -1, 3, 31, 1),),
}


@pytest.mark.parametrize(
    ("name", "is_alike"), [*((name, False) for name in PROMPTS), ("whole chunks", True), ("pending", True)]
)
def test_chunks_of_a_prompt_are_the_recurrence(name: str, is_alike: bool) -> None:
    """`is_alike`: all keys are equal and nothing fades, where inverses by powers would overflow."""
    heads, keys, key_dim, value_dim = 2, 1, 24, 12
    batch = StateBatch(tuple(StateSpan(*numbers) for numbers in PROMPTS[name]))
    n_rows = batch.spans[-1].first_row + batch.spans[-1].n_rows
    mixed = normal(n_rows, 2 * keys * key_dim + heads * value_dim, seed=1)
    decay, beta = -0.3 * normal(n_rows, heads, seed=2).abs(), normal(n_rows, heads, seed=3).sigmoid()
    if is_alike:
        mixed[:, : 2 * keys * key_dim] = mixed[:1, : 2 * keys * key_dim]
        decay, beta = decay * 1e-3, torch.full_like(beta, 0.999)
    pending = heads, key_dim + value_dim + 2
    ours = planes((heads, key_dim, value_dim), pending, n_pending=20)
    theirs, op = twins(ours), DeltaNet()
    expected = op.reference([mixed, decay, beta, theirs.on(batch)])
    given = decay, beta
    got = delta_net(
        mixed, given, ours.states, ours.rings, table(batch, 0), eps=op.eps, is_cyclic=op.is_cyclic
    )
    assert (got - expected).abs().max() <= 1e-3  # operands have tf32's 10 bits
    assert (ours.states - theirs.states).abs().max() <= (
        1e-2 if is_alike else 1e-3
    )  # roundings add up along a key
    torch.testing.assert_close(ours.rings, theirs.rings, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompts_convolution_is_the_references(name: str) -> None:
    batch, channels = StateBatch(tuple(StateSpan(*numbers) for numbers in PROMPTS[name])), 40
    n_rows = batch.spans[-1].first_row + batch.spans[-1].n_rows
    x, weight = normal(n_rows, channels, seed=1), normal(channels, TAPS, seed=2)
    ours = planes((TAPS - 1, channels), (channels,), n_pending=20)
    theirs = twins(ours)
    expected = CausalConv().reference([x, weight, theirs.on(batch)])
    got = causal_conv(x, weight, ours.states, ours.rings, table(batch, 0))
    torch.testing.assert_close(got, expected)
    assert torch.equal(ours.states, theirs.states)
    assert torch.equal(ours.rings, theirs.rings)


def layer(n_rows: int, keys: int = 2, heads: int = 4) -> tuple[Graph, dict[str, PackedTensor]]:
    """A layer between its products: convolution, gates, delta rule, gated norm."""
    dim = 32
    channels, weights = (2 * keys + heads) * dim, dict[str, PackedTensor]()

    def weight(name: str, *shape: int) -> Tensor:
        weights[name] = PackedTensor.pack(normal(*shape, seed=len(weights)), get_format("F32"))
        return Weight(shape, "F32", name)(name=name)

    x, z = (Input((n_rows, n), F32)(name=name) for name, n in (("x", channels), ("z", heads * dim)))
    a, b = (Input((n_rows, heads), F32)(name=name) for name in ("a", "b"))
    window = StateInput.of(0, CONVOLUTION, (TAPS - 1, channels))
    mixed = CausalConv()(x, weight("conv", channels, TAPS), window)
    decay = Mul()(Activation("softplus")(Add()(a, weight("dt", heads))), weight("factor", heads))
    state = StateInput.of(0, DELTA, (heads, dim, dim))
    out = DeltaNet()(mixed, decay, Activation("sigmoid")(b), state)
    norm = RmsNorm(1e-5)(out, weight("norm", dim))
    gated = Mul()(norm, Activation("silu")(Reshape((n_rows, heads, dim))(z)))
    return Graph.of(gated), weights


def test_a_layer_is_four_launches_and_gives_the_reference() -> None:
    graph, weights = layer(N_ROWS)
    weights["factor"] = PackedTensor.pack(-weights["factor"].unpack().abs(), get_format("F32"))
    steps = DevicePlan.of(graph, CudaBackend("cpu").kernels).steps
    assert {step.kernel.name for step in steps} == {"cuda"}
    assert [type(step.stage) for step in steps[1:]] == [DeltaRule, GatedNorm]
    sizes = {node.name: node.shape for node in graph.inputs}
    batch = StateBatch((SPANS[0], SPANS[2]))
    found = []
    for backend in (ReferenceBackend(), CudaBackend("cpu")):
        conv = planes((TAPS - 1, sizes["x"][1]), (sizes["x"][1],))
        delta = planes((4, 32, 32), (4, 66))
        out = _run(backend, graph, weights, conv, delta, batch, sizes)
        found.append((out[is_row(batch)], delta.states, delta.rings, conv.states))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def _run(
    backend: Backend,
    graph: Graph,
    weights: dict[str, PackedTensor],
    conv: StatePlanes,
    delta: StatePlanes,
    batch: StateBatch,
    sizes: dict[str, tuple[int, ...]],
) -> torch.Tensor:
    inputs: dict[str, Any] = {name: normal(*sizes[name], seed=20 + i) for i, name in enumerate("xzab")}
    inputs |= {"state.0.conv": conv.on(batch), "state.0.delta": delta.on(batch)}
    loaded = {name: backend.load(weight) for name, weight in weights.items()}
    plan = DevicePlan.of(graph, backend.kernels)
    if isinstance(backend, ReferenceBackend):
        return backend.prepare(plan, loaded).run(inputs)[0].clone()
    return _steps(backend, plan, loaded, inputs, batch)


def _steps(
    backend: Backend, plan: DevicePlan, loaded: Any, inputs: dict[str, Any], batch: StateBatch
) -> torch.Tensor:
    """Without staging, whose inputs are whole numbers."""
    from motley.backends.cuda.steps import Steps
    from motley.backends.cuda.values import Values
    from motley.backends.cuda.weights import Matrices, own_weights
    from motley.graph import RECURRENT

    given = {
        node: (inputs[node.name].layer, table(batch)) if node.dtype == RECURRENT else inputs[node.name]
        for node in plan.graph.inputs
    }
    values = Values(given)
    steps = Steps(plan.graph, plan.stages, own_weights(loaded), Matrices(torch.device("cpu")))
    for stage in plan.stages:
        steps.prepare(stage)(values)
    out: torch.Tensor = values.plain(plan.graph.outputs[0])
    return out


def test_a_device_without_heads_computes_nothing() -> None:
    graph, weights = layer(N_ROWS, keys=0, heads=0)
    conv, delta = (
        planes((TAPS - 1, 0), (0,)),
        StatePlanes(torch.empty(SLOTS, 0, 32, 32), torch.empty(RINGS, PENDING, 0, 66), 0, 0),
    )
    sizes = {node.name: node.shape for node in graph.inputs}
    out = _run(CudaBackend("cpu"), graph, weights, conv, delta, StateBatch((SPANS[0],)), sizes)
    assert out.shape == (N_ROWS, 0, 32)
