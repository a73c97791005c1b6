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

SHAPES = [(5, 256), (100, 768), (4104, 2048), (9000, 1024)]


def packed(kind: str, n_rows: int, n_columns: int) -> PackedTensor:
    generator = torch.Generator().manual_seed(n_rows)
    few = torch.randn(min(n_rows, 64), n_columns, generator=generator) + 0.2
    return PackedTensor.pack(few.repeat(-(-n_rows // len(few)), 1)[:n_rows], get_format(kind))


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0", "Q8_0", "Q6_K", "IQ4_XS", "MXFP4"])
@pytest.mark.parametrize(("n_rows", "n_columns"), SHAPES)
def test_products_of_few_rows(kind: str, n_rows: int, n_columns: int) -> None:
    """Each result is right to a few roundings of what is added up for it; memory beside results stays as it was."""
    weight = packed(kind, n_rows, n_columns)
    planes, dense = to_planes(PackedTensor(weight.data.cuda(), weight.format)), weight.unpack().cuda()
    is_new = warpgroups.is_possible(planes)
    for n_tokens, has_residual in (
        ((3, True), (16, False), (33, True), (65, False)) if is_new else ((9, True),)
    ):
        torch.manual_seed(n_tokens)
        x = torch.randn(n_tokens, n_columns, device="cuda") + 1
        x[0] *= 1e4
        residual = torch.randn(n_tokens, n_rows, device="cuda") if has_residual else None
        rows = convert(x, Rows.empty(HALVES, n_tokens, n_columns, "cuda"))
        guarded = torch.full((n_tokens + 1, n_rows), torch.nan, device="cuda")
        out = matmul(planes, rows, guarded[:-1], residual)
        expected = rows.unpack() @ dense.T + (0 if residual is None else residual)
        added = rows.unpack().abs() @ dense.abs().T
        assert float(((out - expected).abs() / added).max()) < 2e-3, n_tokens
        assert guarded[-1].isnan().all()
        again = matmul(planes, rows, torch.full_like(out, torch.nan), residual)
        assert torch.equal(again, out), "differs from time to time"


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
