"""Products with packed weights on a real GPU, against float32: shapes of all tiles, odd rows, columns and tokens."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from motley.backends.cuda.kernels import warpgroup_matmul as warpgroups
from motley.backends.cuda.kernels.matmul import matmul, tile_for
from motley.backends.cuda.kernels.rows import HALVES, Rows, convert
from motley.backends.cuda.planes import to_planes
from motley.formats import PackedTensor, get_format

SHAPES = [(1, 32), (5, 256), (100, 768), (4096, 2048), (4104, 14336), (9000, 1024)]


def packed(kind: str, n_rows: int, n_columns: int) -> PackedTensor:
    generator = torch.Generator().manual_seed(n_rows)
    few = torch.randn(min(n_rows, 64), n_columns, generator=generator) + 0.2
    return PackedTensor.pack(few.repeat(-(-n_rows // len(few)), 1)[:n_rows], get_format(kind))


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0", "Q8_0", "Q6_K", "IQ4_XS", "MXFP4"])
@pytest.mark.parametrize(("n_rows", "n_columns"), SHAPES)
def test_products_of_few_rows(kind: str, n_rows: int, n_columns: int) -> None:
    """Columns of results that are nobody's stay as they were; what was in memory before does not matter."""
    if n_columns % get_format(kind).block_size:
        pytest.skip("no matrix of that format")
    weight = packed(kind, n_rows, n_columns)
    planes, dense = to_planes(PackedTensor(weight.data.cuda(), weight.format)), weight.unpack().cuda()
    for n_tokens in (1, 3, 8, 9, 16, 31, 33, 64, 65, 128):
        torch.manual_seed(n_tokens)
        x = torch.randn(n_tokens, n_columns, device="cuda") + 1
        x[0] *= 1e4
        residual = torch.randn(n_tokens, n_rows, device="cuda")
        rows = convert(x, Rows.empty(HALVES, n_tokens, n_columns, "cuda"))
        guarded = torch.full((n_tokens + 1, n_rows), torch.nan, device="cuda")
        expected = rows.unpack() @ dense.T
        for added in (None, residual):
            out = matmul(planes, rows, guarded[:-1], added)
            wanted = expected if added is None else expected + added
            assert max(error(o, e) for o, e in zip(out, wanted, strict=True)) < 3e-3, n_tokens
            assert guarded[-1].isnan().all()
            assert torch.equal(matmul(planes, rows, torch.full_like(out, torch.nan), added), out), "differs"


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0"])
def test_warp_groups_agree_with_tiles(kind: str) -> None:
    planes = to_planes(PackedTensor(packed(kind, 6144, 4096).data.cuda(), get_format(kind)))
    if not warpgroups.is_possible(planes):
        pytest.skip("needs Hopper and a version of Triton that was tried")
    for n_tokens in (8, 24, 64):
        x = torch.randn(n_tokens, 4096, device="cuda")
        rows = convert(x, Rows.empty(HALVES, n_tokens, 4096, "cuda"))
        out = torch.empty(n_tokens, 6144, device="cuda")
        plain = matmul(planes, rows, torch.empty_like(out), tile=tile_for(planes, n_tokens))
        assert error(matmul(planes, rows, out), plain) < 5e-4
