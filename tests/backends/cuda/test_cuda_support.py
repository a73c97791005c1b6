"""Graphs that look almost like a stage but are none: what has no kernel runs by its reference, to the same result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from motley.backends import ReferenceBackend
from motley.backends.cuda.backend import CudaBackend
from motley.formats import PackedTensor, get_format
from motley.graph import I32, Graph, Tensor
from motley.graph.ops import (
    Activation,
    GetRows,
    Input,
    Mul,
    Reshape,
    RmsNorm,
    Slice,
    Weight,
)
from motley.plan import DevicePlan

N_TOKENS, EMBD = 3, 64

Build = Callable[[Tensor, Callable[..., Tensor]], Tensor]


def by_vector(x: Tensor, weight: Callable[..., Tensor]) -> Tensor:
    """A product with an activation, but not with as many values."""
    return Mul()(Activation("silu")(x), weight("factors", EMBD))


def computed_norm(x: Tensor, weight: Callable[..., Tensor]) -> Tensor:
    return RmsNorm(1e-5)(x, Reshape((EMBD,))(Slice(0, 0, 1)(x)))


def narrow_norm(x: Tensor, weight: Callable[..., Tensor]) -> Tensor:
    """Rows that are no whole blocks of 32."""
    return RmsNorm(1e-5)(Slice(1, 0, 40)(x), weight("norm", 40))


@pytest.mark.parametrize("build", [by_vector, computed_norm, narrow_norm])
def test_almost_a_stage(build: Build) -> None:
    weights: dict[str, PackedTensor] = {}
    generator = torch.Generator().manual_seed(3)

    def weight(name: str, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        weights[name] = PackedTensor.pack(values, get_format("Q8_0" if len(shape) > 1 else "F32"))
        return Weight(shape, weights[name].format.name, name)(name=name)

    tokens = Input((N_TOKENS,), I32)(name="tokens")
    graph = Graph.of(build(GetRows()(weight("table", 10, EMBD), tokens, name="x"), weight))
    expected, got = (
        backend.prepare(
            DevicePlan.of(graph, backend.kernels), {name: backend.load(w) for name, w in weights.items()}
        ).run({"tokens": torch.tensor([1, 5, 7], dtype=torch.int32)})[0]
        for backend in (ReferenceBackend(), CudaBackend("cpu"))
    )
    assert float((got - expected).norm() / expected.norm()) < 5e-3
