"""Tensors on their way to a GPU, part by part: all of them arrive, whatever their strides and sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.backends.cuda import weights as weights_module
from motley.backends.cuda.upload import Uploader
from motley.backends.cuda.weights import DeviceMatrix, Repacker, load
from motley.formats import PackedTensor, get_format

CPU = torch.device("cpu")


@given(
    st.integers(0, 40), st.integers(1, 60), st.integers(16, 500), st.sampled_from([torch.uint8, torch.int32])
)
def test_a_matrix_arrives_whole_in_parts_of_any_size(
    n_rows: int, n_columns: int, n_bytes: int, dtype: torch.dtype
) -> None:
    data = torch.arange(n_rows * n_columns).reshape(n_rows, n_columns).to(dtype)
    uploader = Uploader(CPU, n_bytes)
    assert torch.equal(uploader.upload(data), data)
    assert torch.equal(uploader.upload(data[:, : n_columns // 2]), data[:, : n_columns // 2])
    assert torch.equal(uploader.upload(data[::2]), data[::2])
    uploader.finish()
    assert torch.equal(uploader.upload(data), data)  # and it can be used again


@pytest.mark.parametrize("shape", [(7,), (3, 4, 5), (1, 1000)])
def test_other_shapes_arrive_too(shape: tuple[int, ...]) -> None:
    data = torch.randn(shape)
    assert torch.equal(Uploader(CPU, 64).upload(data), data)


def test_the_result_does_not_share_memory_with_the_file() -> None:
    data = torch.zeros(64, 64, dtype=torch.uint8)
    there = Uploader(CPU, 256).upload(data)
    data.fill_(1)
    assert not there.any()


def test_matrices_are_repacked_on_a_thread_in_their_order() -> None:
    form, cpu = get_format("Q8_0"), CPU
    weights = [
        PackedTensor(torch.randint(0, 100, (64, 4 * form.block_bytes), dtype=torch.uint8), form)
        for _ in range(5)
    ]
    repacker = Repacker(cpu)
    loaded = [load(weight, cpu, repacker=repacker) for weight in weights]
    repacker.finish()
    for weight, matrix in zip(weights, loaded, strict=True):
        expected = load(weight, cpu)
        assert isinstance(matrix, DeviceMatrix)
        assert isinstance(expected, DeviceMatrix)
        assert torch.equal(matrix.ref.planes.codes, expected.ref.planes.codes)
        assert matrix.nbytes == expected.nbytes


def test_a_matrix_that_cannot_be_repacked_is_an_error_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: PackedTensor) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(weights_module, "to_planes", fail)
    form, repacker = get_format("Q8_0"), Repacker(CPU)
    load(PackedTensor(torch.zeros(1, form.block_bytes, dtype=torch.uint8), form), CPU, None, repacker)
    with pytest.raises(RuntimeError, match="no memory"):
        repacker.finish()
