"""Experts on the GPU's kernels, under Triton's interpreter: every kind of weight, any choice of experts."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from motley.backends import ReferenceBackend
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.kernels.grouped_experts import MIN_TOKENS, groups
from motley.backends.cuda.kernels.route import route, route_weights
from motley.formats import PackedTensor, get_format
from motley.graph import I32, Graph, Tensor
from motley.graph.ops import OPS, ExpertFfn, GetRows, Input, MatMul, Route, RouteWeights, Weight
from motley.plan import DevicePlan

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

N_EXPERTS, N_USED, N_TABLE = 5, 3, 10


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(
    form: str, n_tokens: int, n_embd: int, n_ff: int, function: str = "silu"
) -> tuple[Graph, dict[str, PackedTensor]]:
    """A router and its experts, which have biases unless their gate is a plain one."""
    weights: dict[str, PackedTensor] = {}

    def weight(name: str, *shape: int, packed: str = form) -> Tensor:
        values = normal(*shape, seed=len(weights)) * (shape[-1] ** -0.5 if len(shape) == 3 else 1.0)
        weights[name] = PackedTensor.pack(values, get_format(packed))
        return Weight(shape, packed, name)(name=name)

    table = weight("table", N_TABLE, n_embd, packed="F32")
    x = GetRows()(table, Input((n_tokens,), I32)(name="tokens"))
    logits = MatMul()(x, weight("router", N_EXPERTS, n_embd, packed="F32"))
    ids = Route(N_USED)(logits, Input((n_tokens,), I32)(name="n_used"))
    gate, up = (weight(name, N_EXPERTS, n_ff, n_embd) for name in ("gate", "up"))
    down = weight("down", N_EXPERTS, n_embd, n_ff)
    biases = []
    if function != "silu":
        biases = [
            weight(f"{name}.bias", N_EXPERTS, n, packed="F32")
            for name, n in (("gate", n_ff), ("up", n_ff), ("down", n_embd))
        ]
    chosen = RouteWeights()(logits, ids)
    return Graph.of(ExpertFfn(function)(x, ids, chosen, gate, up, down, *biases), ids), weights


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


def run_both(
    graph: Graph, weights: dict[str, PackedTensor], inputs: dict[str, torch.Tensor]
) -> list[tuple[torch.Tensor, ...]]:
    """The results of the reference, and of the kernels."""
    return [
        tuple(
            t.clone()
            for t in backend.prepare(
                DevicePlan.of(graph, backend.kernels), {name: backend.load(w) for name, w in weights.items()}
            ).run(inputs)
        )
        for backend in (ReferenceBackend(), CudaBackend("cpu"))
    ]


# Up to 8 tokens, activations are rounded to 8 bits: by up to half of 1/127 of the largest of 32 values, which is 0.5 %
# of a typical value. Both factors of the gated product have that error, and hidden values are rounded once more: 1 %
# of the result, up to twice as much in rows with few values. Plain weights are multiplied with float32; for many
# tokens, activations are float16.
def tolerance(form: str, n_tokens: int) -> float:
    if form in ("Q5_0", "F16"):  # Q5_0 is BF16 on the device
        return {"Q5_0": 4e-3, "F16": 1e-5}[form]
    return 2e-2 if n_tokens < MIN_TOKENS else 2e-3


# Interpreted programs take their time: one number of tokens for each kernel and kind of weight.
@pytest.mark.parametrize(
    ("form", "function", "n_tokens"),
    [
        *((form, "silu", 3) for form in ("Q8_0", "Q5_0", "F16")),
        *((form, "silu", 1) for form in ("Q4_0", "Q4_K", "Q6_K", "IQ4_NL")),
        *((form, "clamped_swiglu", 3) for form in ("MXFP4", "F16")),
        *((form, "silu", 12) for form in ("Q8_0", "Q4_0", "Q4_K", "Q6_K")),
        ("MXFP4", "clamped_swiglu", 12),
        ("F16", "silu", 9),  # plain weights are not grouped
    ],
)
def test_chosen_experts_give_the_reference(form: str, function: str, n_tokens: int) -> None:
    block = max(get_format(form).block_size, 32)
    n_embd, n_ff = (256, 256) if block == 256 else (64, 96)
    graph, weights = layer(form, n_tokens, n_embd, n_ff, function)
    inputs = {
        "tokens": torch.tensor([7, 2, 5, 9, 0, 1, 3, 4, 6, 8, 7, 5][:n_tokens], dtype=torch.int32),
        "n_used": torch.tensor([3, 0, 1, 2, 3, 3, 3, 0, 1, 2, 3, 3][:n_tokens], dtype=torch.int32),
    }
    expected, got = run_both(graph, weights, inputs)
    assert torch.equal(got[1], expected[1])  # the router is exact: no other expert is chosen
    error = float((got[0] - expected[0]).norm() / expected[0].norm())
    assert error < tolerance(form, n_tokens)
    assert not got[0][inputs["n_used"] == 0].any()


@pytest.mark.parametrize(("n_tokens", "n_experts"), [(9, 5), (40, 3), (300, 4), (9, 100)])
def test_blocks_hold_each_slot_once_with_its_expert(n_tokens: int, n_experts: int) -> None:
    generator = torch.Generator().manual_seed(n_tokens)
    for case in range(4):
        ids = torch.randint(-1, n_experts, (n_tokens, 3), generator=generator, dtype=torch.int32)
        if case:  # no expert at all, one expert for all tokens, the last one
            ids.fill_({1: -1, 2: 0, 3: n_experts - 1}[case])
        found = groups(ids, n_experts)
        seen = []
        for expert, start, stop in zip(found.experts, found.starts, found.stops, strict=True):
            if expert >= 0:
                slots = found.order[int(start) : min(int(start) + found.size, int(stop))].tolist()
                assert slots
                assert all(ids.flatten()[slot] == expert for slot in slots)
                seen += slots
        assert sorted(seen) == [slot for slot, expert in enumerate(ids.flatten().tolist()) if expert >= 0]
        assert len(found.experts) == n_tokens * 3 // found.size + min(n_experts, n_tokens * 3)


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
    kernels = {out.op.name: step.kernel.name for step in steps for out in step.stage.outputs}
    assert {kernels[name] for name in ("route", "route_weights", "expert_ffn")} == {"cuda"}
