"""Experts on the GPU's kernels, under Triton's interpreter: every kind of weight, any choice of experts."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from motley.backends import ReferenceBackend
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.kernels.route import route, route_weights
from motley.formats import PackedTensor, get_format
from motley.graph import I32, Graph, Tensor
from motley.graph.ops import OPS, ExpertFfn, GetRows, Input, MatMul, Route, RouteWeights, Weight
from motley.plan import DevicePlan

N_EXPERTS, N_USED, N_TABLE = 5, 3, 10


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(form: str, n_tokens: int, n_embd: int, n_ff: int) -> tuple[Graph, dict[str, PackedTensor]]:
    """A router and its experts."""
    weights: dict[str, PackedTensor] = {}

    def weight(name: str, *shape: int, packed: str = form) -> Tensor:
        values = normal(*shape, seed=len(weights)) * shape[-1] ** -0.5
        weights[name] = PackedTensor.pack(values, get_format(packed))
        return Weight(shape, packed, name)(name=name)

    table = weight("table", N_TABLE, n_embd, packed="F32")
    x = GetRows()(table, Input((n_tokens,), I32)(name="tokens"))
    logits = MatMul()(x, weight("router", N_EXPERTS, n_embd, packed="F32"))
    ids = Route(N_USED)(logits, Input((n_tokens,), I32)(name="n_used"))
    gate, up = (weight(name, N_EXPERTS, n_ff, n_embd) for name in ("gate", "up"))
    down = weight("down", N_EXPERTS, n_embd, n_ff)
    return Graph.of(ExpertFfn()(x, ids, RouteWeights()(logits, ids), gate, up, down), ids), weights


@pytest.mark.parametrize("name", ["route", "route_weights"])
def test_routes_are_the_references(name: str) -> None:
    prototype = OPS[name].__new__(OPS[name])  # `samples` uses no attribute of its instance
    for seed in range(3):
        for sample in prototype.samples(random.Random(seed)):
            op, values = sample.op, [v.unpack() if isinstance(v, PackedTensor) else v for v in sample.inputs]
            if isinstance(op, Route) and op.n_groups_used == op.n_groups:
                got = route(op, values[0], values[1], values[2] if len(values) > 2 else None)
                assert torch.equal(got, op.reference(values))
            elif isinstance(op, RouteWeights):
                torch.testing.assert_close(route_weights(op, *values), op.reference(values))


def test_equal_scores_and_a_nan_are_chosen_as_by_the_reference() -> None:
    logits = torch.tensor([[0.5, 2.0, 2.0, 2.0, 0.5], [1.0, float("nan"), 3.0, float("-inf"), 0.0]])
    n_used = torch.tensor([4, 4], dtype=torch.int32)
    ids = route(Route(4), logits, n_used, None)
    assert torch.equal(ids, Route(4).reference([logits, n_used]))
    assert route_weights(RouteWeights(), logits, ids)[1].isnan().any()


@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL", "Q5_0", "F16"])
def test_chosen_experts_give_the_reference(form: str, n_tokens: int) -> None:
    block = max(get_format(form).block_size, 32)
    n_embd, n_ff = (256, 256) if block == 256 else (64, 96)
    graph, weights = layer(form, n_tokens, n_embd, n_ff)
    inputs = {
        "tokens": torch.tensor([7, 2, 5][:n_tokens], dtype=torch.int32),
        "n_used": torch.tensor([3, 0, 1][:n_tokens], dtype=torch.int32),
    }
    expected, got = (
        backend.prepare(
            DevicePlan.of(graph, backend.kernels), {name: backend.load(w) for name, w in weights.items()}
        ).run(inputs)
        for backend in (ReferenceBackend(), CudaBackend("cpu"))
    )
    assert torch.equal(got[1], expected[1])  # the router is exact: no other expert is chosen
    assert float((got[0] - expected[0]).norm() / expected[0].norm()) < 0.02  # activations of 8 bits, twice
    assert not got[0][inputs["n_used"] == 0].any()


def test_a_nan_in_one_token_stays_there() -> None:
    graph, weights = layer("Q8_0", 2, 64, 96)
    backend = CudaBackend("cpu")
    table = weights["table"].unpack().clone()
    table[3, 5] = float("nan")
    weights["table"] = PackedTensor.pack(table, get_format("F32"))
    plan = DevicePlan.of(graph, backend.kernels)
    loaded = {name: backend.load(w) for name, w in weights.items()}
    out, _ = backend.prepare(plan, loaded).run(
        {"tokens": torch.tensor([3, 4], dtype=torch.int32), "n_used": torch.tensor([2, 2], dtype=torch.int32)}
    )
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_every_stage_of_an_expert_layer_has_a_kernel_that_needs_no_copy_of_chosen_weights() -> None:
    graph, _ = layer("Q4_0", 2, 64, 96)
    steps = DevicePlan.of(graph, CudaBackend("cpu").kernels).steps
    kernels = {step.stage.outputs[0].op.name: step.kernel.name for step in steps}
    assert {kernels[name] for name in ("route", "route_weights", "expert_ffn")} == {"cuda"}
