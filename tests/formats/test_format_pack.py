"""Packing loses little, agrees with the `gguf` package where that can pack, and survives hostile values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gguf
from gguf import GGMLQuantizationType
from motley.formats import FORMATS, Format
from motley.gguf import read_spec
from thorough import examples

ALL = [pytest.param(fmt, id=name) for name, fmt in FORMATS.items()]
QUANTIZED = [pytest.param(fmt, id=name) for name, fmt in FORMATS.items() if fmt.block_size > 1]
SAME_AS_GGUF = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"]

# Root mean square error on a normal distribution, relative to its deviation, some 2 % above what is reached.
RELATIVE_ERROR = {
    "F32": 0.0,
    "F16": 3e-4,
    "BF16": 2e-3,
    "Q8_0": 0.0055,
    "Q6_K": 0.0173,
    "Q5_K": 0.0355,
    "Q5_1": 0.0388,
    "Q5_0": 0.0438,
    "Q4_K": 0.0715,
    "IQ4_NL": 0.0800,
    "IQ4_XS": 0.0756,
    "Q4_1": 0.0800,
    "Q4_0": 0.0880,
    "MXFP4": 0.120,
    "Q3_K": 0.147,
    "Q2_K": 0.268,
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("scale", [1.0, 0.02, 300.0])
def test_a_normal_distribution_survives_within_the_bound_of_its_bits(fmt: Format, scale: float) -> None:
    values = normal(64, 1024) * scale
    error = rms(fmt.unpack(fmt.pack(values)) - values) / scale
    assert error <= RELATIVE_ERROR[fmt.name]


@pytest.mark.parametrize("name", SAME_AS_GGUF)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_bytes_are_those_of_the_gguf_package(name: str, scale: float) -> None:
    values = normal(64, 1024, seed=3) * scale
    expected = gguf.quants.quantize(values.numpy(), GGMLQuantizationType[name]).view(np.uint8)
    np.testing.assert_array_equal(FORMATS[name].pack(values).numpy(), expected)


@pytest.mark.parametrize("name", SAME_AS_GGUF)
def test_ties_round_as_in_the_gguf_package(name: str) -> None:
    values = torch.randint(-16, 17, (200, 32), generator=torch.Generator().manual_seed(0)) / 2
    expected = gguf.quants.quantize(values.numpy(), GGMLQuantizationType[name]).view(np.uint8)
    np.testing.assert_array_equal(FORMATS[name].pack(values).numpy(), expected)


def test_weights_are_packed_no_worse_than_by_llama_cpp(shared: Path) -> None:
    """The golden files have the same weights as F16 and as llama.cpp quantized them."""
    ratios: dict[str, float] = {}
    for path in sorted((shared / "golden").glob("*/model-*.gguf")):
        original, quantized = read_spec(path.with_name("model.gguf")), read_spec(path)
        for type_name in {info.type_name for info in quantized.tensors.values()} & set(FORMATS) - {
            "F32",
            "F16",
        }:
            name = next(name for name, info in quantized.tensors.items() if info.type_name == type_name)
            values, fmt = original.tensor(name).unpack(), FORMATS[type_name]
            theirs = rms(quantized.tensor(name).unpack() - values)
            ours = rms(fmt.unpack(fmt.pack(values)) - values)
            ratios[type_name] = max(ratios.get(type_name, 0.0), ours / theirs)
    # IQ4_NL has to be quick, for the cache's sake, where llama.cpp searches for the scales of weights.
    assert ratios.pop("IQ4_NL") <= 1.03
    assert set(ratios) == {"Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4"}
    assert max(ratios.values()) <= 1.00001, ratios


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_what_was_unpacked_is_packed_again_almost_exactly(fmt: Format) -> None:
    once = fmt.unpack(fmt.pack(normal(16, 1024)))
    twice = fmt.unpack(fmt.pack(once))
    assert rms(twice - once) <= 0.25 * RELATIVE_ERROR[fmt.name]


@pytest.mark.parametrize("fmt", ALL)
def test_zeros_stay_zeros(fmt: Format) -> None:
    assert not fmt.unpack(fmt.pack(torch.zeros(2, 512))).any()


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("constant", [1.0, -1.0, 0.01, 1000.0])
def test_a_constant_stays_near_itself(fmt: Format, constant: float) -> None:
    values = torch.full((2, 512), constant)
    rtol = 0.25 if fmt.name == "MXFP4" else 0.02  # its scale is a power of two; 7.9 becomes 6
    torch.testing.assert_close(fmt.unpack(fmt.pack(values)), values, rtol=rtol, atol=0)


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("huge", [1e6, 1e20, 3.4e38])
def test_huge_values_saturate(fmt: Format, huge: float) -> None:
    unpacked = fmt.unpack(fmt.pack(normal(8, 512).sign() * huge))
    assert unpacked.isfinite().all()
    assert unpacked.abs().max() > 60_000


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("tiny", [1e-6, 1e-9, 1e-30, 1e-42])
def test_tiny_values_stay_tiny(fmt: Format, tiny: float) -> None:
    unpacked = fmt.unpack(fmt.pack(normal(8, 512) * tiny))
    assert unpacked.abs().max() <= max(4 * tiny, 1e-5)


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_damage_shows_in_its_own_block_only(fmt: Format, bad: float) -> None:
    values = normal(1, 4 * fmt.block_size)
    values[0, fmt.block_size + 3] = bad
    blocks = fmt.unpack(fmt.pack(values)).view(4, -1)
    assert (blocks[1].isinf() if fmt.name == "MXFP4" else blocks[1].isnan()).all()  # MXFP4 has no NaN
    assert blocks[[0, 2, 3]].isfinite().all()


@settings(max_examples=examples(100), deadline=None)
@given(
    name=st.sampled_from([name for name, fmt in FORMATS.items() if fmt.block_size > 1]),
    few=st.lists(st.floats(width=32), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
)
def test_any_values_can_be_packed(name: str, few: list[float], seed: int) -> None:
    fmt = FORMATS[name]
    values = torch.tensor(few)[torch.randint(len(few), (256,), generator=torch.Generator().manual_seed(seed))]
    blocks = fmt.unpack(fmt.pack(values)).view(-1, fmt.block_size)
    assert torch.equal(blocks.isfinite().all(-1), values.view(-1, fmt.block_size).isfinite().all(-1))
