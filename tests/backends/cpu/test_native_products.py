"""Matrix products with weights of every format: exact, and with quantized activations within their precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_driver import INSTRUCTION_SETS, CpuBackend, ExactCpuBackend, run_op

from motley.backends.cpu.native import FORMATS as NATIVE_FORMATS
from motley.backends.cpu.native import PLAIN_FORMATS, ROW_FORMATS
from motley.backends.cpu.weights import MappedTensor, RepackedTensor
from motley.formats import FORMATS, PackedTensor
from motley.graph import I32, Graph
from motley.graph.ops import GetRows, Input, MatMul, Weight
from motley.plan import DevicePlan
from thorough import examples

QUANTIZED = sorted(set(NATIVE_FORMATS) - set(PLAIN_FORMATS))


def draw_weight(name: str, n_rows: int, n_blocks: int, seed: int = 0) -> PackedTensor:
    form, generator = FORMATS[name], torch.Generator().manual_seed(seed)
    n_columns = n_blocks * max(form.block_size, 2)
    return PackedTensor.pack(torch.randn(n_rows, n_columns, generator=generator), form)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """In double precision, where the squares of huge values are finite."""
    result, expected = result.double(), expected.double()
    return ((result - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", NATIVE_FORMATS)
@pytest.mark.parametrize("n_tokens", [1, 2, 7, 33])
def test_products_are_the_references(name: str, n_tokens: int, instruction_set: str) -> None:
    weight = draw_weight(name, n_rows=37, n_blocks=40 if name in PLAIN_FORMATS else 3)
    x = torch.randn(n_tokens, weight.shape[1])
    expected = MatMul().reference([x, weight])
    assert relative_error(run_op(ExactCpuBackend(instruction_set), MatMul(), [x, weight]), expected) < 2e-6
    allowed = 2e-6 if name in PLAIN_FORMATS else 0.02  # 8 bits of activations
    assert relative_error(run_op(CpuBackend(instruction_set), MatMul(), [x, weight]), expected) < allowed


def extreme_weight(name: str, n_rows: int, n_blocks: int, seed: int) -> PackedTensor:
    """Blocks whose bytes are often the largest and smallest codes, with the scales of ordinary numbers."""
    form, generator = FORMATS[name], torch.Generator().manual_seed(seed)
    ordinary = draw_weight(name, n_rows, n_blocks, seed).data
    extremes = torch.tensor([0x00, 0x7F, 0x80, 0x81, 0xFF], dtype=torch.uint8)
    drawn = extremes[torch.randint(5, ordinary.shape, generator=generator)]
    sane = PackedTensor(drawn, form).unpack().isfinite()  # a scale of those bytes may be no number
    size = sane.view(n_rows, n_blocks, -1).all(-1).repeat_interleave(form.block_bytes, 1)
    code_bytes = {"Q8_0": slice(2, 34), "IQ4_NL": slice(2, 18), "Q4_0": slice(2, 18)}.get(name)
    if code_bytes:  # where codes and scales are apart, only codes are drawn
        keep = torch.ones(form.block_bytes, dtype=torch.bool)
        keep[code_bytes] = False
        return PackedTensor(torch.where(keep.repeat(n_blocks), ordinary, drawn), form)
    return PackedTensor(torch.where(size, drawn, ordinary), form)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@given(
    name=st.sampled_from(QUANTIZED),
    n_rows=st.integers(1, 50),
    n_blocks=st.integers(1, 5),
    n_tokens=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(60), deadline=None)
def test_no_sum_of_products_overflows(
    instruction_set: str, name: str, n_rows: int, n_blocks: int, n_tokens: int, seed: int
) -> None:
    """The largest codes times the largest activations: whole numbers, so all instruction sets find the same."""
    weight = extreme_weight(name, n_rows, n_blocks, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    signs = torch.randint(2, (n_tokens, weight.shape[1]), generator=generator) * 2.0 - 1.0
    signs[:, ::2] = signs[:, 1::2]  # neighbours of one sign add up
    result = run_op(CpuBackend(instruction_set), MatMul(), [signs, weight])
    expected = MatMul().reference([signs, weight])  # ±1 is a code of 8 bits: nothing is lost
    scale = weight.unpack().abs().sum(1)
    assert ((result - expected).abs() <= 1e-6 * scale + 1e-30).all()


@given(
    name=st.sampled_from(list(NATIVE_FORMATS)),
    n_rows=st.integers(1, 50),
    n_blocks=st.integers(1, 5),
    n_tokens=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(60), deadline=None)
def test_any_shape_will_do(name: str, n_rows: int, n_blocks: int, n_tokens: int, seed: int) -> None:
    weight = draw_weight(name, n_rows, n_blocks, seed)
    x = torch.randn(n_tokens, weight.shape[1], generator=torch.Generator().manual_seed(seed + 1))
    expected = MatMul().reference([x, weight])
    torch.testing.assert_close(
        run_op(ExactCpuBackend(), MatMul(), [x, weight]), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", NATIVE_FORMATS)
def test_repacked_weights_keep_their_values_and_their_size(name: str) -> None:
    weight, backend = draw_weight(name, n_rows=32, n_blocks=4), CpuBackend()
    repacked = backend.load(weight)
    assert isinstance(repacked, RepackedTensor)
    assert repacked.nbytes == weight.nbytes
    assert torch.equal(repacked.unpack(), weight.unpack())


def mapping_backend(instruction_set: str = "") -> CpuBackend:
    """One that has been told of a model large enough to stay in its file."""
    backend = CpuBackend(instruction_set)
    backend.expect_weights(1 << 30)
    return backend


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@given(
    n_rows=st.integers(1, 4).map(lambda n: 16 * n),
    n_blocks=st.integers(1, 40),
    n_tokens=st.integers(1, 20),
    seed=st.integers(0, 2**16),
    is_extreme=st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_products_of_mapped_weights_are_those_of_repacked_ones(
    instruction_set: str, n_rows: int, n_blocks: int, n_tokens: int, seed: int, is_extreme: bool
) -> None:
    draw = extreme_weight if is_extreme else draw_weight
    weight = draw("Q8_0", n_rows, n_blocks, seed)
    x = torch.randn(n_tokens, weight.shape[1], generator=torch.Generator().manual_seed(seed + 1))
    repacked = run_op(CpuBackend(instruction_set), MatMul(), [x, weight])
    mapped = run_op(mapping_backend(instruction_set), MatMul(), [x, weight])
    room = 1e-5 * (x.abs() @ weight.unpack().abs().T)
    assert ((mapped - repacked).abs() <= room).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("n_blocks", [1, 15, 17, 100, 255, 300, 513])  # also more than a run (rows.hpp)
@pytest.mark.parametrize("pattern", [(1, 0, 75), (3, 64, 0), (1, 8192, 100)])
def test_mapped_weights_give_the_bits_of_repacked_ones_by_every_pattern(
    instruction_set: str, n_blocks: int, pattern: tuple[int, int, int]
) -> None:
    weight = draw_weight("Q8_0", 48, n_blocks)
    mapped = mapping_backend(instruction_set)
    assert mapped._patterns.report == []  # chooses when it is made
    mapped._pool.set_pattern(ROW_FORMATS["Q8_0"], *pattern)
    for n_tokens in (1, 2, 5):
        x = torch.randn(n_tokens, weight.shape[1], generator=torch.Generator().manual_seed(n_blocks))
        repacked = run_op(CpuBackend(instruction_set), MatMul(), [x, weight])
        assert torch.equal(run_op(mapped, MatMul(), [x, weight]), repacked)


def test_weights_of_large_models_are_not_copied() -> None:
    weight = draw_weight("Q8_0", 32, 2)
    loaded = mapping_backend().load(weight)
    assert isinstance(loaded, MappedTensor)
    assert loaded.data.data_ptr() == weight.data.data_ptr()


def test_what_kernels_cannot_read_in_the_files_layout_is_repacked() -> None:
    odd, columns = draw_weight("Q8_0", 37, 2), draw_weight("Q8_0", 32, 4)
    half = PackedTensor(columns.data[:, : 2 * 34], columns.format)  # as a device that has half of the columns
    for weight in (odd, half, draw_weight("Q4_0", 32, 2)):
        assert isinstance(mapping_backend().load(weight), RepackedTensor)
    exact = ExactCpuBackend()
    exact.expect_weights(1 << 30)
    assert isinstance(exact.load(draw_weight("Q8_0", 32, 2)), RepackedTensor)
    bound = CpuBackend()
    bound.use_threads(1, [0])
    bound.expect_weights(1 << 30)  # in memory beside its cores
    assert isinstance(bound.load(draw_weight("Q8_0", 32, 2)), RepackedTensor)


@pytest.mark.parametrize("name", QUANTIZED)
def test_random_bytes_are_weights_too(name: str) -> None:
    """Codes that no packer writes, and scales that are negative, tiny or not numbers."""
    form, generator = FORMATS[name], torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (64, 2 * form.block_bytes), generator=generator, dtype=torch.uint8)
    weight = PackedTensor(data, form)
    unpacked = CpuBackend().load(weight).unpack()
    torch.testing.assert_close(unpacked, weight.unpack(), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("n_rows", [0, 5])
@pytest.mark.parametrize("n_columns", [0, 32])
def test_empty_shares(n_rows: int, n_columns: int) -> None:
    weight = PackedTensor(FORMATS["Q8_0"].pack(torch.randn(n_rows, n_columns)), FORMATS["Q8_0"])
    for backend in (CpuBackend(), ExactCpuBackend()):
        for n_tokens in (1, 3):
            result = run_op(backend, MatMul(), [torch.ones(n_tokens, n_columns), weight])
            assert result.shape == (n_tokens, n_rows)
            assert n_columns or not result.any()


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K"])
def test_damage_shows_in_its_row_only(name: str, damage: float) -> None:
    weight = draw_weight(name, 20, 1)
    x = torch.randn(3, weight.shape[1])
    x[1, 3] = damage
    result = run_op(CpuBackend(), MatMul(), [x, weight])
    assert not result[1].isfinite().any()
    assert result[[0, 2]].isfinite().all()


def test_tiny_and_huge_activations_keep_their_precision() -> None:
    weight = draw_weight("Q4_0", 16, 2)
    x = torch.randn(4, 64) * torch.tensor([1e-20, 1e-35, 1e20, 0.0])[:, None]
    result, expected = run_op(CpuBackend(), MatMul(), [x, weight]), MatMul().reference([x, weight])
    assert relative_error(result[0], expected[0]) < 0.02
    assert relative_error(result[2], expected[2]) < 0.02
    assert result[1].abs().max() < 1e-30
    assert not result[3].any()


@pytest.mark.parametrize("name", NATIVE_FORMATS)
def test_rows_of_mapped_tables(name: str) -> None:
    """Tables that are only looked up stay in the file's own layout."""
    table = draw_weight(name, n_rows=40, n_blocks=3)
    ids = torch.tensor([3, 39, 0, -1, 3, *range(20)], dtype=torch.int32)
    backend = ExactCpuBackend()
    node = GetRows()(Weight(table.shape, name)(name="table"), Input(tuple(ids.shape), I32)(name="ids"))
    plan = DevicePlan.of(Graph.of(node), backend.kernels)
    (result,) = backend.prepare(plan, {"table": table}).run({"ids": ids})
    torch.testing.assert_close(result, GetRows().reference([table, ids]), rtol=1e-6, atol=1e-7)
