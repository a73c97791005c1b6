"""Products with packed weights under Triton's interpreter, against the formats' own unpacking."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from motley.backends.cuda import products
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.compiling import recording
from motley.backends.cuda.kernels import matvec as matvec_module
from motley.backends.cuda.kernels.matmul import matmul
from motley.backends.cuda.kernels.matvec import Tile, matvec, max_vectors, tile_for
from motley.backends.cuda.kernels.rows import HALVES, INT8, PLAIN, Rows, convert
from motley.backends.cuda.kernels.unpack import unpack_by_value, unpack_rows
from motley.backends.cuda.planes import join_rows, to_planes
from motley.backends.cuda.products import (
    Copies,
    library_product,
    plain_values,
    unpacked,
    unpacked_product,
)
from motley.backends.cuda.weights import load
from motley.formats import PackedTensor, get_format

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

KINDS = ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"]
SAME_PLANES = ["Q4_1", "IQ4_NL"]  # as others of another name


def packed(kind: str, n_rows: int, n_columns: int = 256) -> PackedTensor:
    generator = torch.Generator().manual_seed(n_rows)
    return PackedTensor.pack(torch.randn(n_rows, n_columns, generator=generator), get_format(kind))


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


@pytest.mark.parametrize("form", [INT8, HALVES, PLAIN])
def test_rows_stand_for_what_they_were_made_of(form: str) -> None:
    x = torch.randn(2, 96) * torch.tensor([[1e5], [1e-3]])
    x[0, :32] = 0
    rows = convert(x, Rows.empty(form, 2, 96, "cpu"))
    for got, row in zip(rows.unpack(), x, strict=True):
        assert error(got, row) < {INT8: 1e-2, HALVES: 1e-3, PLAIN: 0.0}[form] or torch.equal(got, row)


@pytest.mark.parametrize("kind", KINDS)
def test_matvec(kind: str) -> None:
    torch.manual_seed(1)
    weight, x_residual = packed(kind, 5, 512), torch.randn(1, 5)
    x = convert(torch.randn(1, 512), Rows.empty(INT8, 1, 512, "cpu"))
    expected = x.unpack() @ weight.unpack().T
    out = matvec(to_planes(weight), x, poisoned(1, 5), tile=Tile(4, 8, 1))
    assert error(out, expected) < 2e-3  # scales of scales are multiplied out, to float16
    in_place = x_residual.clone()
    matvec(to_planes(weight), x, in_place, residual=in_place, tile=Tile(2, 32, 1))
    assert error(in_place, expected + x_residual) < 2e-3


@pytest.mark.parametrize(("kind", "n_rows"), [*((kind, 5) for kind in KINDS), ("Q4_K", 1), ("Q4_K", 2)])
def test_runs_of_rows_are_all_rows(kind: str, n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two programs: runs of two and three rows, of one and one, and of one row alone."""
    monkeypatch.setattr(matvec_module, "_WARPS", 2)
    torch.manual_seed(1)
    planes, residual = to_planes(packed(kind, n_rows, 512)), torch.randn(1, n_rows)
    x = convert(torch.randn(1, 512), Rows.empty(INT8, 1, 512, "cpu"))
    for tile in (Tile(1, 16, 1), Tile(1, 32, 1)):
        expected = matvec(planes, x, poisoned(1, n_rows), residual, tile=Tile(2, 16, 1))
        out = matvec(planes, x, poisoned(1, n_rows), residual, tile=tile)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(matvec(planes, x, poisoned(1, n_rows), tile=tile), expected - residual)


@pytest.mark.parametrize(
    ("kind", "n_vectors", "tile"),
    [
        *((kind, 2, Tile(8, 16, 1)) for kind in KINDS),
        ("Q4_K", max_vectors(512), Tile(8, 16, 1)),
        ("Q6_K", 3, Tile(8, 32, 1)),
        ("Q4_K", 2, Tile(1, 16, 1)),  # alone, by a program that takes a run of rows
    ],
)
def test_a_few_vectors_give_what_each_gives_alone(kind: str, n_vectors: int, tile: Tile) -> None:
    torch.manual_seed(2)
    planes, x, residual = (
        to_planes(packed(kind, 5, 512)),
        torch.randn(n_vectors, 512),
        torch.randn(n_vectors, 5),
    )
    rows = convert(x, Rows.empty(INT8, n_vectors, 512, "cpu"))
    out = matvec(planes, rows, poisoned(n_vectors, 5), residual=residual, tile=tile)
    for i in range(n_vectors):
        row = convert(x[i : i + 1], Rows.empty(INT8, 1, 512, "cpu"))
        assert torch.equal(
            matvec(planes, row, poisoned(1, 5), residual=residual[i : i + 1], tile=tile)[0], out[i]
        )


@pytest.mark.parametrize("n_columns", [32, 2048, 4096, 5120, 14336, 16384, 28672, 32768, 53248])
def test_several_vectors_need_whole_rows_in_a_program(n_columns: int) -> None:
    is_whole = n_columns <= 32 * tile_for(n_columns).blocks
    assert (max_vectors(n_columns) > 1) == is_whole
    assert max_vectors(512, Tile(8, 8, 1)) == 1


@pytest.mark.parametrize(("kind", "n_tokens"), [*((kind, 3) for kind in KINDS), ("Q4_K", 20), ("Q8_0", 65)])
def test_matmul_adds_a_residual(kind: str, n_tokens: int) -> None:
    torch.manual_seed(1)
    weight, x, residual = packed(kind, 5), torch.randn(n_tokens, 256), torch.randn(n_tokens, 5)
    rows = convert(x, Rows.empty(HALVES, n_tokens, 256, "cpu"))
    out = matmul(to_planes(weight), rows, poisoned(n_tokens, 5), residual=residual)
    assert error(out, x @ weight.unpack().T + residual) < 2e-3


@pytest.mark.parametrize("kind", KINDS)
def test_small_weights_are_not_shifted(kind: str) -> None:
    """Scales whose sixteenth is a subnormal float16, and rows that have a mean: an error of one sign would add up."""
    torch.manual_seed(1)
    weight = PackedTensor.pack(torch.randn(5, 512) * 2e-3, get_format(kind))
    x = torch.randn(3, 512) + 3
    rows = convert(x, Rows.empty(HALVES, 3, 512, "cpu"))
    out = matmul(to_planes(weight), rows, poisoned(3, 5))
    assert error(out, x @ weight.unpack().T) < 1e-2


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "IQ4_NL"])
def test_a_matrix_of_one_block(kind: str) -> None:
    weight = packed(kind, 1, 32)
    chosen = unpack_rows(to_planes(weight), torch.zeros(1, dtype=torch.int32), poisoned(1, 32))
    assert error(chosen, weight.unpack()) < 2e-3


@pytest.mark.parametrize("kind", [*KINDS, *SAME_PLANES])
def test_unpacking_by_value_and_by_row(kind: str) -> None:
    torch.manual_seed(1)
    weight = packed(kind, 5)
    planes = to_planes(weight)
    by_value = unpack_by_value(planes, torch.empty(5, 256, dtype=torch.float16))
    assert error(by_value.float().unflatten(1, (32, -1)).mT.flatten(1), weight.unpack()) < 2e-3
    chosen = unpack_rows(planes, torch.tensor([4, -1, 0], dtype=torch.int32), poisoned(3, 256))
    assert error(chosen[[0, 2]], weight.unpack()[[4, 0]]) < 2e-3
    assert not chosen[1].any()


@pytest.mark.parametrize("kind", [*KINDS, *SAME_PLANES, "F16", "BF16", "Q5_K"])
def test_matrices_on_top_of_each_other_can_be_taken_apart(kind: str) -> None:
    parts = [to_planes(packed(kind, n)) for n in (3, 2)]
    joined = join_rows(parts)
    assert joined.n_rows == 5
    assert joined.n_bytes == sum(part.n_bytes for part in parts)
    assert torch.equal(joined.rows(3, 5).codes, parts[1].codes)


def test_a_backend_knows_which_formats_have_no_packed_kernel() -> None:
    backend, device = CudaBackend("cpu"), torch.device("cpu")
    assert backend.unpacks("Q5_K")
    assert load(packed("Q5_K", 5), device).nbytes == 5 * 256 * 2
    assert not backend.unpacks("IQ4_XS")
    assert load(packed("IQ4_XS", 5), device).nbytes == 5 * 256 * 18 // 32
    assert backend.unpacks("F32")  # to half of its bits
    assert load(packed("F32", 1100), device).nbytes == 1100 * 256 * 2
    assert load(packed("F32", 5), device).nbytes == 5 * 256 * 4  # few rows: a router
    assert not backend.unpacks("F16")


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("n_columns", [80, 96])
def test_plain_values_stay_as_they_are_wherever_a_device_s_part_is_cut(kind: str, n_columns: int) -> None:
    weight = packed(kind, 5, n_columns)
    planes = to_planes(weight)
    assert planes.kind == kind
    assert torch.equal(plain_values(planes).float(), weight.unpack())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q5_K"])
def test_products_with_plain_values(kind: str) -> None:
    torch.manual_seed(1)
    weight, residual = packed(kind, 5), torch.randn(3, 5)
    x = torch.randn(3, 256) * torch.tensor([[1.0], [1e5], [0.0]])  # more than float16 holds, and nothing
    with torch.backends.mkldnn.flags(enabled=False):  # it may claim a bfloat16 that the CPU lacks
        out = library_product(x, plain_values(to_planes(weight)), residual)
    for got, expected in zip(out, x @ weight.unpack().T + residual, strict=True):
        assert error(got, expected) < 5e-3


def test_a_matrix_of_which_a_device_has_no_columns() -> None:
    fmt = get_format("Q4_K")
    planes = to_planes(PackedTensor(torch.empty(5, 0, dtype=torch.uint8), fmt))
    nothing, residual = torch.empty(2, 0), torch.randn(2, 5)
    assert not library_product(nothing, plain_values(planes), None).any()
    assert torch.equal(library_product(nothing, plain_values(planes), residual), residual)


def test_many_rows_go_through_unpacked_weights() -> None:
    torch.manual_seed(1)
    weight, x, residual = packed("Q6_K", 5), torch.randn(3, 256), torch.randn(3, 5)
    for fixed in (0, 16):  # each row's own scale, and one for all
        rows = convert(x, Rows.empty(HALVES, 3, 256, "cpu", fixed))
        out = unpacked_product(unpacked(to_planes(weight)), rows, torch.empty(3, 5), residual)
        assert error(out, x @ weight.unpack().T + residual) < 2e-3


def test_copies_are_made_once_where_memory_is_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    planes, copies = to_planes(packed("Q6_K", 5)), Copies()
    assert copies.get(planes) is None
    copies.is_kept = True
    with recording({}):  # nothing is computed then
        assert copies.get(planes) is not None
    first = copies.get(planes)
    assert first is not None
    assert torch.equal(first, unpacked(planes))
    monkeypatch.setattr(products, "unpacked", Mock(side_effect=torch.OutOfMemoryError("no memory")))
    assert copies.get(planes) is first
    assert copies.get(to_planes(packed("Q6_K", 5))) is None  # the memory is gone
    assert not copies.is_kept


@pytest.mark.parametrize("exponent", [100, 104, 140, 141])
def test_powers_of_two_beyond_float16_are_not_packed(exponent: int) -> None:
    weight = packed("MXFP4", 3)
    weight.data[:, ::17] = exponent
    planes = to_planes(weight)
    assert planes.kind == ("MXFP4" if 104 <= exponent <= 140 else "BF16")
    if planes.kind == "MXFP4":
        ids = torch.arange(3, dtype=torch.int32)
        assert torch.equal(unpack_rows(planes, ids, poisoned(3, 256)), weight.unpack())
    else:
        assert error(plain_values(planes).float(), weight.unpack()) < 1e-2
