"""A packed tensor looks like the tensor that it unpacks to."""

from __future__ import annotations

import torch

from motley.formats import FORMATS, PackedTensor


def packed(*shape: int, name: str = "Q4_0") -> PackedTensor:
    return PackedTensor.pack(torch.randn(*shape, generator=torch.Generator().manual_seed(0)), FORMATS[name])


def test_shape_and_bytes() -> None:
    tensor = packed(3, 5, 64)
    assert tensor.shape == (3, 5, 64) == tuple(tensor.unpack().shape)
    assert tensor.nbytes == 3 * 5 * 2 * 18


def test_a_vector_is_one_row() -> None:
    tensor = packed(64, name="F32")
    assert tensor.shape == (64,)
    assert tensor.data.shape == (256,)


def test_rows_by_index() -> None:
    tensor = packed(7, 64)
    index = torch.tensor([[3, 3], [0, 6]])
    assert torch.equal(tensor.rows(index), tensor.unpack()[index])


def test_a_slice_of_rows_shares_memory() -> None:
    tensor = packed(7, 64)
    part = tensor.slice_rows(2, 5)
    assert torch.equal(part.unpack(), tensor.unpack()[2:5])
    assert part.data.data_ptr() == tensor.data[2].data_ptr()


def test_float32_unpacks_without_a_copy() -> None:
    tensor = packed(4, 8, name="F32")
    assert tensor.unpack().data_ptr() == tensor.data.data_ptr()
