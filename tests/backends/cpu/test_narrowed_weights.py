"""Matrices of F32 that hold bf16 values are kept as BF16, with the same results."""

from __future__ import annotations

import pytest
import torch
from native_driver import INSTRUCTION_SETS, CpuBackend, ReferenceBackend, run_op

from motley.formats import PackedTensor, get_format
from motley.graph.ops import MatMul

F32 = get_format("F32")


def matrix(n_rows: int, n_columns: int) -> torch.Tensor:
    """Values that bf16 holds exactly, extremes included."""
    values = torch.randn(n_rows, n_columns, generator=torch.Generator().manual_seed(1))
    values[0, :4] = torch.tensor([0.0, -0.0, 3e38, 1e-40])
    return values.bfloat16().float()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_products_are_those_of_the_same_numbers(instruction_set: str) -> None:
    values = matrix(64, 70)
    values[0, 2] = 3.0
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(2))
    backend = CpuBackend(instruction_set)
    loaded = backend.load(PackedTensor.pack(values, F32))
    assert (loaded.format.name, loaded.nbytes) == ("BF16", 64 * 70 * 2)
    assert torch.equal(loaded.unpack(), values)
    product = run_op(backend, MatMul(), [x, PackedTensor.pack(values, F32)])
    expected = run_op(ReferenceBackend(), MatMul(), [x, PackedTensor.pack(values, F32)])
    torch.testing.assert_close(product, expected, rtol=1e-6, atol=1e-5)  # not rounded to bf16 on the way


def test_other_numbers_stay_as_they_are() -> None:
    values = matrix(8, 64)
    values[7, 63] = 1 + 2**-9
    backend = CpuBackend()
    loaded = backend.load(PackedTensor.pack(values, F32))
    assert loaded.format.name == "F32"
    assert torch.equal(loaded.unpack(), values)


@pytest.mark.parametrize("shape", [(8, 63), (0, 64), (64,)])
def test_shapes_that_two_byte_kernels_do_not_take_stay_as_they_are(shape: tuple[int, ...]) -> None:
    loaded = CpuBackend().load(PackedTensor.pack(torch.ones(shape), F32))
    assert loaded.format.name == "F32"


def test_extremes_survive() -> None:
    values = matrix(8, 64)
    values[1, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    loaded = CpuBackend().load(PackedTensor.pack(values, F32))
    assert loaded.format.name == "BF16"
    torch.testing.assert_close(loaded.unpack(), values, rtol=0, atol=0, equal_nan=True)
