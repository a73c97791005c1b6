"""Unpacking is bit-exact with the `gguf` package, over random bytes and over files that llama.cpp wrote."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import gguf
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from motley.errors import ModelError
from motley.formats import FORMATS, Format, get_format
from motley.gguf import read_spec

ALL = [pytest.param(fmt, id=name) for name, fmt in FORMATS.items()]


def oracle(fmt: Format, data: np.ndarray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # 0 * inf, where a random scale is infinite
        return gguf.quants.dequantize(data, GGMLQuantizationType[fmt.name])


def test_the_table_holds_the_promised_formats() -> None:
    promised = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS MXFP4"
    assert list(FORMATS) == promised.split()


@pytest.mark.parametrize("fmt", ALL)
def test_block_sizes_are_those_of_ggml(fmt: Format) -> None:
    assert (fmt.block_size, fmt.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[fmt.name]]


@pytest.mark.parametrize("fmt", ALL)
def test_random_bytes_unpack_as_in_the_gguf_package(fmt: Format) -> None:
    # Random bytes hold every extreme: infinite, NaN, negative and subnormal scales.
    data = np.random.default_rng(1).integers(0, 256, (400, 4 * fmt.block_bytes), dtype=np.uint8)
    ours = fmt.unpack(torch.from_numpy(data)).numpy()
    np.testing.assert_array_equal(ours, oracle(fmt, data), strict=True)  # NaN equals NaN here


@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_uniform_bytes_unpack_as_in_the_gguf_package(fmt: Format, byte: int) -> None:
    data = np.full((2, 3 * fmt.block_bytes), byte, dtype=np.uint8)
    np.testing.assert_array_equal(fmt.unpack(torch.from_numpy(data)).numpy(), oracle(fmt, data))


def test_golden_files_unpack_as_in_the_gguf_package(shared: Path) -> None:
    seen = set()
    for path in sorted((shared / "golden").glob("*/model-*.gguf")):
        spec = read_spec(path)
        for name, info in spec.tensors.items():
            if info.type_name not in FORMATS:
                continue
            packed = spec.tensor(name)
            expected = oracle(packed.format, packed.data.numpy())
            np.testing.assert_array_equal(packed.unpack().numpy(), expected, err_msg=f"{path}: {name}")
            seen.add(info.type_name)
    assert seen >= {"F32", "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}


@pytest.mark.parametrize("fmt", ALL)
def test_rows_keep_their_leading_axes(fmt: Format) -> None:
    data = torch.zeros(2, 3, 2 * fmt.block_bytes, dtype=torch.uint8)
    values = fmt.unpack(data)
    assert values.shape == (2, 3, 2 * fmt.block_size)
    assert values.dtype == torch.float32
    assert fmt.pack(values).shape == data.shape


@pytest.mark.parametrize("fmt", ALL)
def test_no_rows_at_all(fmt: Format) -> None:
    values = torch.empty(0, 2 * fmt.block_size)
    assert fmt.unpack(fmt.pack(values)).shape == values.shape


def test_a_row_has_whole_blocks() -> None:
    with pytest.raises(ModelError, match=r"300 values .* Q4_K blocks of 256"):
        get_format("Q4_K").row_bytes(300)
    with pytest.raises(ModelError, match=r"17 bytes .* Q4_0 blocks of 18"):
        get_format("Q4_0").row_values(17)
    with pytest.raises(ModelError, match="Q8_0"):
        get_format("Q8_0").pack(torch.zeros(2, 33))


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"NVFP4 .*supported: F32, .*MXFP4"):
        get_format("NVFP4")


def test_names_are_found_in_any_case() -> None:
    assert get_format("q4_k") is FORMATS["Q4_K"]
