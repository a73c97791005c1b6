"""Experts on the GPU's kernels, under Triton's interpreter: every kind of weight, any choice of experts."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from motley.backends import ReferenceBackend
from motley.backends.cuda import steps
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.kernels.grouped_experts import MIN_TOKENS, block_size, groups
from motley.backends.cuda.kernels.route import route, route_weights
from motley.formats import PackedTensor, get_format
from motley.graph import I32, Graph, Tensor
from motley.graph.ops import OPS, ExpertFfn, GetRows, Input, LocalIds, MatMul, Route, RouteWeights, Weight
from motley.ownership import Word
from motley.plan import DevicePlan

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

N_EXPERTS, N_USED, N_TABLE = 5, 3, 10


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(
    form: str,
    n_tokens: int,
    n_embd: int,
    n_ff: int,
    function: str = "silu",
    n_experts: int = N_EXPERTS,
    n_before: int = 0,
) -> tuple[Graph, dict[str, PackedTensor]]:
    """A router and its experts, which have biases unless their gate is a plain one. `n_before`: experts that are on
    another device.
    """
    weights: dict[str, PackedTensor] = {}

    def weight(name: str, *shape: int, packed: str = form) -> Tensor:
        values = normal(*shape, seed=len(weights)) * (shape[-1] ** -0.5 if len(shape) == 3 else 1.0)
        weights[name] = PackedTensor.pack(values, get_format(packed))
        return Weight(shape, packed, name)(name=name)

    table = weight("table", N_TABLE, n_embd, packed="F32")
    x = GetRows()(table, Input((n_tokens,), I32)(name="tokens"))
    logits = MatMul()(x, weight("router", n_before + n_experts, n_embd, packed="F32"))
    ids = Route(N_USED)(logits, Input((n_tokens,), I32)(name="n_used"))
    gate, up = (weight(name, n_experts, n_ff, n_embd) for name in ("gate", "up"))
    down = weight("down", n_experts, n_embd, n_ff)
    biases = []
    if function != "silu":
        biases = [
            weight(f"{name}.bias", n_experts, n, packed="F32")
            for name, n in (("gate", n_ff), ("up", n_ff), ("down", n_embd))
        ]
    chosen = RouteWeights()(logits, ids)
    local = LocalIds(Word.run([n_before, n_experts]), 1)(ids) if n_before else ids
    return Graph.of(ExpertFfn(function)(x, local, chosen, gate, up, down, *biases), ids), weights


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


# Interpreted programs take their time: one number of tokens for each kernel and kind of weight. Experts with few tokens
# each have other blocks.
@pytest.mark.parametrize(
    ("form", "function", "n_tokens"),
    [
        ("Q8_0", "silu", 5),
        ("Q4_0", "silu", 5),
        ("MXFP4", "clamped_swiglu", 5),
        *((form, "silu", 3) for form in ("Q8_0", "Q5_0", "F16")),
        *((form, "silu", 1) for form in ("Q4_0", "Q4_K", "Q6_K", "IQ4_NL")),
        *((form, "clamped_swiglu", 3) for form in ("MXFP4", "F16")),
        *((form, "silu", 12) for form in ("Q8_0", "Q4_0", "Q4_K", "Q6_K")),
        ("MXFP4", "clamped_swiglu", 12),
        ("F16", "silu", 9),  # plain weights are not grouped
    ],
)
def test_chosen_experts_give_the_reference(form: str, function: str, n_tokens: int) -> None:
    check(form, function, n_tokens)


@pytest.mark.parametrize(
    ("form", "function"), [("Q8_0", "silu"), ("Q4_0", "silu"), ("MXFP4", "clamped_swiglu")]
)
def test_small_blocks_of_slots_give_the_reference(form: str, function: str) -> None:
    check(form, function, 12, n_experts=9)
    assert block_size(12 * N_USED, 9) < block_size(12 * N_USED, N_EXPERTS)


@pytest.mark.parametrize("n_tokens", [3, 5, 12])
def test_experts_of_one_device_are_found_by_global_ids(
    n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps.route_kernel, "local_ids", Mock(side_effect=AssertionError("one more launch")))
    check("Q8_0", "silu", n_tokens, n_before=2, n_experts=3)


def test_local_ids_that_are_read_elsewhere_are_made() -> None:
    graph, weights = layer("Q8_0", 3, 64, 96, n_before=2, n_experts=3)
    ffn, _ = graph.outputs
    both = Graph.of(ffn, ffn.inputs[1])
    inputs = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in FEW.items()}
    expected, got = run_both(both, weights, inputs)
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[0], expected[0], atol=0.1, rtol=0.02)


FEW = {"tokens": [7, 2, 5], "n_used": [3, 0, 1]}


def check(form: str, function: str, n_tokens: int, n_experts: int = N_EXPERTS, n_before: int = 0) -> None:
    block = max(get_format(form).block_size, 32)
    n_embd, n_ff = (256, 256) if block == 256 else (64, 96)
    graph, weights = layer(form, n_tokens, n_embd, n_ff, function, n_experts, n_before)
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
