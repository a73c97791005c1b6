"""Every op that has a native kernel gives what its reference gives, on every instruction set."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from native_driver import INSTRUCTION_SETS, CpuBackend, ExactCpuBackend, run_op

from motley.formats import PackedTensor
from motley.graph import F32, I32, Graph, Tensor
from motley.graph.ops import OPS, Activation, Add, Input, Mul, RmsNorm, Rope, Softmax, Weight
from motley.graph.tensor import Op, Sample
from motley.plan import DevicePlan

WITHOUT_SAMPLES = {"input", "weight", "hadamard", "cache_store", "attention"}
ALWAYS_NATIVE = {
    "add",
    "mul",
    "scale",
    "activation",
    "softmax",
    "rms_norm",
    "slice",
    "concat",
    "permute",
    "route",
    "route_weights",
    "expert_ffn",
}


def samples(name: str) -> list[Sample]:
    prototype = OPS[name].__new__(OPS[name])  # `samples` uses no attribute of its instance
    return [sample for seed in range(4) for sample in prototype.samples(random.Random(seed))]


def kernels_of(op: Op, values: tuple[object, ...]) -> set[str]:
    """The kernels of a plan for one op; none for a view."""
    nodes: list[Tensor] = []
    for i, value in enumerate(values):
        if isinstance(value, PackedTensor):
            nodes.append(Weight(value.shape, value.format.name)(name=f"x{i}"))
        else:
            assert isinstance(value, torch.Tensor)
            kind = I32 if value.dtype == torch.int32 else F32
            nodes.append(Input(tuple(value.shape), kind)(name=f"x{i}"))
    backend = ExactCpuBackend()
    plan = DevicePlan.of(Graph.of(op(*nodes)), backend.kernels)
    return {step.kernel.name for step in plan.steps}


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", sorted(set(OPS) - WITHOUT_SAMPLES))
def test_native_results_are_the_references(name: str, instruction_set: str) -> None:
    backend = ExactCpuBackend(instruction_set)
    for sample in samples(name):
        expected = sample.op.reference(sample.inputs)
        result = run_op(backend, sample.op, sample.inputs)
        assert result.dtype == expected.dtype
        scale = expected.abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=sample.op.tolerance * max(scale, 1.0))


@pytest.mark.parametrize("name", sorted(ALWAYS_NATIVE))
def test_samples_of_common_ops_run_natively(name: str) -> None:
    assert all(kernels_of(sample.op, sample.inputs) <= {"native"} for sample in samples(name))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh"])
def test_functions_hold_at_the_edges(function: str, instruction_set: str) -> None:
    edges = [0.0, -0.0, 1e-40, -1e-40, 1e-30, 88.0, -88.0, 104.0, -104.0, 1e30, -1e30, torch.nan]
    x = torch.tensor(edges)
    expected = Activation(function).reference([x])
    result = run_op(ExactCpuBackend(instruction_set), Activation(function), [x])
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    largest = run_op(ExactCpuBackend(instruction_set), Activation(function), [torch.tensor([torch.inf])])
    assert largest.item() in (1, torch.inf)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_softmax_of_infinities(instruction_set: str) -> None:
    x = torch.tensor([[1.0, -torch.inf, 3.0], [1e30, 0.0, -1e30]])
    result = run_op(ExactCpuBackend(instruction_set), Softmax(), [x])
    torch.testing.assert_close(result, torch.softmax(x, -1))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_nothing_in_nothing_out(shape: tuple[int, int]) -> None:
    backend, x = ExactCpuBackend(), torch.zeros(shape)
    for op, inputs in [
        (Add(), [x, x]),
        (Mul(), [x, torch.ones(shape[1])]),
        (Activation("silu"), [x]),
        (Softmax(), [x]),
        (RmsNorm(1e-5), [x]),
    ]:
        assert run_op(backend, op, inputs).shape == shape


def test_broadcasts_in_front_and_behind() -> None:
    backend, a = ExactCpuBackend(), torch.randn(3, 4, 5)
    for shape in [(3, 4, 5), (4, 5), (5,), (1, 4, 5), (3, 4, 1), (3, 1, 1), (1, 1, 1), (1, 4, 1)]:
        b = torch.randn(shape)
        torch.testing.assert_close(run_op(backend, Add(), [a, b]), a + b)


def test_a_nan_in_a_row_stays_in_that_row() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = torch.nan
    result = run_op(ExactCpuBackend(), RmsNorm(1e-5), [x, torch.ones(64)])
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


def test_rope_far_out_turns_by_the_same_angles() -> None:
    positions = torch.tensor([0, 1, 131_071], dtype=torch.int32)
    x = torch.randn(3, 2, 64)
    for style in ("interleaved", "halves"):
        op = Rope(64, 5e5, style)
        torch.testing.assert_close(
            run_op(ExactCpuBackend(), op, [x, positions]), op.reference([x, positions]), rtol=0, atol=1e-4
        )


def test_executables_of_a_backend_share_their_memory_and_survive_its_growth() -> None:
    backend = CpuBackend()

    def prepare(n: int) -> Any:
        x = Input((1, n), F32)(name="x")
        graph = Graph.of(Add()(Mul()(x, x), x))
        return backend.prepare(DevicePlan.of(graph, backend.kernels), {})

    small, x = prepare(8), torch.arange(8.0)[None]
    (first,) = small.run({"x": x})
    large = prepare(1 << 20)
    assert large.n_activation_bytes > 1000 * small.n_activation_bytes
    (other,) = large.run({"x": torch.full((1, 1 << 20), 3.0)})
    assert torch.equal(other, torch.full((1, 1 << 20), 12.0))
    (second,) = small.run({"x": x})
    assert torch.equal(second, x * x + x)
    assert first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
