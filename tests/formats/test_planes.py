"""Planes: what a KV cache stores, and of which a GGUF block is an arrangement."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.formats import FORMATS, QUANTIZERS, Quantizer
from motley.formats.bits import join_bits, split_bits
from motley.formats.grids import IQ4_GRID, CodebookGrid, SignedGrid, UniformGrid

ALL = [pytest.param(quantizer, id=name) for name, quantizer in QUANTIZERS.items()]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_every_cache_type_has_planes() -> None:
    assert set(QUANTIZERS) == {"Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL"}


@pytest.mark.parametrize("quantizer", ALL)
def test_planes_have_one_code_per_value_and_one_scale_per_block(quantizer: Quantizer) -> None:
    planes = quantizer.quantize(normal(2, 3, 96))
    assert planes.codes.shape == (2, 3, 96)
    assert planes.codes.dtype == torch.uint8
    assert planes.scale.shape == (2, 3, 3)
    assert planes.scale.dtype == torch.float16
    assert (planes.minimum is not None) == quantizer.has_minimum
    assert int(planes.codes.max()) < 2**quantizer.bits


@pytest.mark.parametrize("quantizer", ALL)
def test_packed_blocks_are_an_arrangement_of_the_planes(quantizer: Quantizer) -> None:
    values, fmt = normal(5, 128), FORMATS[quantizer.name]
    assert torch.equal(quantizer.dequantize(quantizer.quantize(values)), fmt.unpack(fmt.pack(values)))


@pytest.mark.parametrize("quantizer", ALL)
def test_half_precision_input_is_quantized_as_its_float_values(quantizer: Quantizer) -> None:
    values = normal(4, 64).half()
    from_half, from_float = quantizer.quantize(values), quantizer.quantize(values.float())
    assert torch.equal(from_half.codes, from_float.codes)
    assert torch.equal(from_half.scale, from_float.scale)


def test_q8_codes_are_signed_bytes() -> None:
    planes = QUANTIZERS["Q8_0"].quantize(torch.linspace(-127, 127, 32))
    levels = planes.codes.view(torch.int8)
    assert (levels[0], levels[-1]) == (-127, 127)


@given(
    bits=st.sampled_from([1, 2, 4, 8]),
    width=st.sampled_from([1, 4, 16, 32]),
    groups=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_bit_fields_can_be_split_and_joined(bits: int, width: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (2, groups * width), dtype=torch.uint8, generator=generator)
    codes = split_bits(data, bits, width)
    assert codes.shape == (2, groups * width * 8 // bits)
    assert int(codes.max()) < 2**bits
    assert torch.equal(join_bits(codes, bits, width), data)


def test_width_one_is_a_little_endian_bit_string() -> None:
    codes = split_bits(torch.tensor([0b0000_0110, 0b1000_0000], dtype=torch.uint8), bits=1, width=1)
    assert codes.nonzero().flatten().tolist() == [1, 2, 15]


GRIDS = [UniformGrid(0, 15), UniformGrid(-4, 3), SignedGrid(-127, 127), IQ4_GRID, CodebookGrid((-5, 0, 1, 7))]


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_the_nearest_level_is_the_nearest(grid: UniformGrid | SignedGrid | CodebookGrid) -> None:
    x = torch.linspace(grid.lowest - 3, grid.highest + 3, 5001)
    levels = torch.tensor(
        grid.table if isinstance(grid, CodebookGrid) else range(grid.lowest, grid.highest + 1)
    )
    least = (x.unsqueeze(-1) - levels).abs().amin(-1)
    torch.testing.assert_close((grid.levels(grid.nearest(x)) - x).abs(), least)
    torch.testing.assert_close((grid.snap(x.clone()) - x).abs(), least)
