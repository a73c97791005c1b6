"""Activations in the forms that products take, written by whatever kernel computes them (`store_rows`).

INT8     codes c = round(x / s) per 32 values, scale s = max|x| / 127, total t = s · Σ c (`matvec`). 32 values with a
         NaN or an infinity have the scale NaN, so that every product with them is NaN: damage shows. The totals serve
         weights with a minimum or an unsigned code: Σ (c_w - 8) · x = Σ c_w · x - 8 · Σ x. Word w of all blocks comes
         before word w + 1 of any, as in the weights' planes.
HALVES   float16 after division by the row's largest magnitude, so that no model's outliers overflow, or by a number
         that is the same for all rows (`fixed`) where it is known that none can; value i of all blocks of 32 before
         value i + 1 of any (`matmul`, and products with weights unpacked in that order). Totals of blocks serve the
         same weights as above. With a fixed number a product needs no other pass over its result.
PLAIN    float32, as they are.

Reference: `Rows.unpack`, which undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait

INT8, HALVES, PLAIN = "int8", "halves", "plain"


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of activations (rows, columns) in one of the forms."""

    form: str
    values: torch.Tensor  # int32 words (rows, columns / 4), float16 or float32 (rows, columns)
    scale: torch.Tensor  # float32: INT8 (rows, columns / 32), HALVES (rows,), PLAIN empty
    total: torch.Tensor  # (rows, columns / 32): INT8 float32, HALVES float16; otherwise empty
    fixed: int = 0  # HALVES: the scale of all rows; 0: each row has its own

    @staticmethod
    def empty(form: str, n_rows: int, n_columns: int, device: torch.device | str, fixed: int = 0) -> Rows:
        """`fixed` is for HALVES; other forms have no use for it."""
        assert form == PLAIN or n_columns % 32 == 0, "rows are whole blocks of 32"
        none = torch.empty(0, device=device)
        if form == INT8:
            words = torch.empty(n_rows, n_columns // 4, dtype=torch.int32, device=device)
            scale, total = (torch.empty(n_rows, n_columns // 32, device=device) for _ in range(2))
            return Rows(form, words, scale, total)
        if form == HALVES:
            values = torch.empty(n_rows, n_columns, dtype=torch.float16, device=device)
            total = torch.empty(n_rows, n_columns // 32, dtype=torch.float16, device=device)
            return Rows(form, values, torch.empty(n_rows, device=device), total, fixed)
        return Rows(form, torch.empty(n_rows, n_columns, device=device), none, none)

    @property
    def n_rows(self) -> int:
        return self.values.shape[0]

    @property
    def n_columns(self) -> int:
        return self.values.shape[1] * (4 if self.form == INT8 else 1)

    @property
    def bytes_or_values(self) -> torch.Tensor:
        """The memory that kernels write to: INT8 byte by byte."""
        return self.values.view(torch.int8) if self.form == INT8 else self.values

    def unpack(self) -> torch.Tensor:
        """The values of the rows: float32 (rows, columns)."""
        if self.form == INT8:
            by_word = torch.unflatten(self.values, -1, (8, -1))
            words = by_word.transpose(1, 2).contiguous()  # (rows, blocks, 8)
            return (words.view(torch.int8).float() * self.scale.unsqueeze(-1)).flatten(-2)
        if self.form == HALVES:
            natural = torch.unflatten(self.values, -1, (32, -1)).transpose(1, 2).flatten(-2)
            return natural.float() * self.scale.unsqueeze(-1)
        return self.values


@triton.jit
def nan_if_damaged(scale, x):
    """scale (n,), or NaN where a value of x (n, m) is not finite. Maxima alone would lose a NaN."""
    is_odd = tl.where(tl.abs(x) <= 3.4028234e38, 0, 1)  # false for NaN
    return tl.where(tl.max(is_odd, 1) > 0, float("nan"), scale)


@triton.jit
def store_rows(
    x, values, scale, total, row, b, BLOCKS: tl.constexpr, FORM: tl.constexpr, FIXED: tl.constexpr = 0
):
    """Store x (blocks, 32) float32 as blocks `b` of `row`.

    HALVES without a fixed scale: x must be the whole row, zero outside of it.
    """
    inside, i = b < BLOCKS, tl.arange(0, 32)[None, :]
    start = row * BLOCKS * 32
    if FORM == "int8":
        s = tl.max(tl.abs(x), 1) / 127.0
        c = tl.floor(x * tl.where(s > 0, 1.0 / tl.maximum(s, 1e-30), 0.0)[:, None] + 0.5)
        s = nan_if_damaged(s, x)
        place = ((i // 4) * BLOCKS + b[:, None]) * 4 + i % 4
        tl.store(values + start + place, c.to(tl.int8), inside[:, None])
        tl.store(scale + row * BLOCKS + b, s, inside)
        tl.store(total + row * BLOCKS + b, s * tl.sum(c, 1), inside)
    elif FORM == "halves":
        if FIXED > 0:
            s = tl.full([], FIXED, tl.float32)
        else:
            s = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-30)
        h = (x / s).to(tl.float16)
        tl.store(values + start + i * BLOCKS + b[:, None], h, inside[:, None])
        tl.store(scale + row, s)
        tl.store(total + row * BLOCKS + b, tl.sum(h.to(tl.float32), 1).to(tl.float16), inside)
    else:
        tl.store(values + start + b[:, None] * 32 + i, x, inside[:, None])


@triton.jit
def _convert(
    x, values, scale, total, BLOCKS: tl.constexpr, BB: tl.constexpr, FORM: tl.constexpr, FIXED: tl.constexpr
):
    let_next_start()
    wait()
    row, b = tl.program_id(0).to(tl.int64), tl.program_id(1) * BB + tl.arange(0, BB)
    flat = (row * BLOCKS + b)[:, None] * 32 + tl.arange(0, 32)[None, :]
    v = tl.load(x + flat, (b < BLOCKS)[:, None], other=0.0)
    store_rows(v, values, scale, total, row, b, BLOCKS, FORM, FIXED)


def tile_of(form: str, n_blocks: int) -> tuple[int, int]:
    """Blocks of a program and its warps: a whole row where the form needs its maximum."""
    blocks = triton.next_power_of_2(n_blocks) if form == HALVES else min(32, triton.next_power_of_2(n_blocks))
    return blocks, max(1, min(16, blocks // 8))


def convert(x: torch.Tensor, out: Rows) -> Rows:
    """x (rows, columns) float32 → `out`, in its form."""
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert x.shape == (out.n_rows, out.n_columns)
    n_blocks = out.n_columns // 32
    blocks, warps = tile_of(out.form, n_blocks)
    _convert[(out.n_rows, triton.cdiv(n_blocks, blocks))](
        x, out.bytes_or_values, out.scale, out.total,
        BLOCKS=n_blocks, BB=blocks, FORM=out.form, FIXED=out.fixed, num_warps=warps, **overlapping(),
    )  # fmt: skip
    return out
