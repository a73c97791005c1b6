"""Attention of single queries over the packed, paged cache: softmax(scale · q·Kᵀ)·V, split over the context.

A program takes one query row, one KV head with the `G` query heads that share it (padded to 16, a tensor-core tile) and
a share of the row's blocks; `combine` joins the shares. Planes are those of kvcache.store: (block, head row, tile of 32
dims, token, width). Quantized tiles are read as 32-bit words (token, word), and byte i of all words is one operand:

    q8_0  dims 4w + i              q4_0  dims 32 (w // 4) + 4 (w % 4) + i, and those + 16 in the upper nibbles

so that a word's bytes reach float16 in place, pairs of words at a time, in the layout that the tensor cores want; the
queries are loaded in the same order. Base 2 throughout: the queries carry scale · log₂e.
Reference: graph.ops.Attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import INTERPRETED, biased_byte, biased_nibble, biased_sixteenfold

LOG2E = 1.4426950408889634
KINDS = ("f16", "q8_0", "q4_0")
ROWS = 16  # query heads of a group, padded


@triton.constexpr_function
def n_parts(kind):
    """Operands that a tile of words is taken apart into."""
    return {"f16": 1, "q8_0": 4, "q4_0": 8}[kind]


@triton.constexpr_function
def part_width(kind, dim):
    """Columns of an operand: values or words of a token, at least what a tensor core takes."""
    return max(16, triton.next_power_of_2(dim // n_parts(kind)))


@triton.jit
def dims(w, part: tl.constexpr, KIND: tl.constexpr):
    """Which dims are in columns w of operand `part`."""
    if KIND == "f16":
        return w
    elif KIND == "q8_0":
        return 4 * w + part
    else:
        return w // 4 * 32 + w % 4 * 4 + part % 4 + part // 4 * 16


@triton.jit
def load_tile(
    codes, scale, at, KIND: tl.constexpr, W: tl.constexpr, BS: tl.constexpr, DIM: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """A block of one head, as (BS tokens, W columns) or by column: values, or words and their scales."""
    PER: tl.constexpr = 32 // n_parts(KIND)  # columns of a tile
    TILES: tl.constexpr = DIM // 32
    w, tile, t = tl.arange(0, W), tl.arange(0, W // PER), tl.arange(0, BS)
    if BY_COLUMN:
        w, tile, t = w[:, None], tile[:, None], t[None, :]
    else:
        w, tile, t = w[None, :], tile[None, :], t[:, None]
    x = tl.load(
        codes + ((at * TILES + w // PER) * BS + t) * PER + w % PER, (w < TILES * PER) & (t >= 0), other=0
    )
    if KIND == "f16":
        return x, x
    s = tl.load(scale + (at * TILES + tile) * BS + t, (tile < TILES) & (t >= 0), other=0.0)
    if BY_COLUMN:  # a scale is read once, and spread over its columns in registers
        return x, tl.reshape(tl.broadcast_to(tl.expand_dims(s, 1), [W // PER, PER, BS]), [W, BS])
    else:
        return x, tl.reshape(tl.broadcast_to(tl.expand_dims(s, 2), [BS, W // PER, PER]), [BS, W])


@triton.jit
def operand(x, scale, part: tl.constexpr, KIND: tl.constexpr, PLAIN: tl.constexpr):
    """Operand `part` of a tile, float16; `unit` is what its numbers count."""
    if KIND == "f16":
        return x
    elif KIND == "q8_0":
        return (biased_byte(x, part, PLAIN) - 1152.0) * scale
    elif part < 4:
        return (biased_nibble(x, part, False, PLAIN) - 1032.0) * scale
    else:
        return (biased_sixteenfold(x, part - 4, PLAIN) - 1152.0) * scale


@triton.constexpr_function
def unit(part, kind):
    """Upper nibbles stay where they are in their bytes, and are sixteen times too large."""
    return 1 / 16 if kind == "q4_0" and part >= 4 else 1.0


@triton.jit
def _load_queries(q, r, g, scale, KIND: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, part: tl.constexpr):
    W: tl.constexpr = part_width(KIND, DIM)
    d = dims(tl.arange(0, W), part, KIND)
    ok = (g < G)[:, None] & (tl.arange(0, W) < DIM // n_parts(KIND))[None, :]
    return (tl.load(q + (r + g)[:, None] * DIM + d[None, :], ok, other=0.0) * scale).to(tl.float16)


@triton.jit
def _attend(
    q, k_codes, k_scale, v_codes, v_scale, tables, row_table, row_position, firsts,
    out, peaks, sums, table_stride, head_rows, first_row, window, factor, n_splits, min_blocks,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, G: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(2), tl.program_id(0), tl.program_id(1)
    n_heads = tl.num_programs(0)
    table, position = tl.load(row_table + row), tl.load(row_position + row)
    first = tl.load(firsts + table)  # the position that the table starts with
    lowest = tl.maximum(position - window + 1, first)
    start, stop = (lowest - first) // BS, (position - first) // BS + 1  # blocks of the table
    share = tl.maximum(tl.cdiv(stop - start, n_splits), min_blocks)
    begin, end = start + split * share, tl.minimum(start + (split + 1) * share, stop)
    if begin >= end:
        return
    g, t = tl.arange(0, 16), tl.arange(0, BS)
    r = (row * n_heads + head) * G
    KW: tl.constexpr = part_width(K_KIND, DIM)
    VW: tl.constexpr = part_width(V_KIND, DIM)
    KP: tl.constexpr = n_parts(K_KIND)
    VP: tl.constexpr = n_parts(V_KIND)
    queries = ()
    for i in tl.static_range(KP):
        queries = queries + (_load_queries(q, r, g, factor * unit(i, K_KIND), K_KIND, G, DIM, i),)  # type: ignore[assignment]
    acc = ()
    for i in tl.static_range(VP):
        acc = acc + (tl.zeros([16, VW], tl.float32),)  # type: ignore[assignment]
    peak, total = tl.full([16], -float("inf"), tl.float32), tl.zeros([16], tl.float32)
    for b in range(begin, end):
        block = tl.load(tables + table * table_stride + b).to(tl.int64)
        at = block * head_rows + first_row + head
        # Keys are addressed as the product wants them, (column, token): a transposition would move them.
        x, x_scale = load_tile(k_codes, k_scale, at, K_KIND, KW, BS, DIM, BY_COLUMN=True)
        y, y_scale = load_tile(v_codes, v_scale, at, V_KIND, VW, BS, DIM, BY_COLUMN=False)
        s = tl.zeros([16, BS], tl.float32)
        for i in tl.static_range(KP):
            s = tl.dot(queries[i], operand(x, x_scale, i, K_KIND, PLAIN), s)
        key = first + b * BS + t
        s = tl.where(((key >= lowest) & (key <= position))[None, :], s, -float("inf"))
        top = tl.maximum(peak, tl.max(s, 1))
        fade = tl.exp2(peak - top)
        p = tl.exp2(s - top[:, None])
        total = total * fade + tl.sum(p, 1)
        peak = top
        p = p.to(tl.float16)
        joined = ()
        for i in tl.static_range(VP):
            joined = joined + (tl.dot(p, operand(y, y_scale, i, V_KIND, PLAIN), acc[i] * fade[:, None]),)  # type: ignore[assignment]
        acc = joined
    place = (r + g) * n_splits + split
    w = tl.arange(0, VW)
    ok = (g < G)[:, None] & (w < DIM // VP)[None, :]
    for i in tl.static_range(VP):
        at = place[:, None].to(tl.int64) * DIM + dims(w, i, V_KIND)[None, :]
        tl.store(out + at, acc[i] * unit(i, V_KIND), ok)
    tl.store(peaks + place, peak, g < G)
    tl.store(sums + place, total, g < G)


@dataclass(frozen=True, eq=False)
class CachePlanes:
    """K or V of all blocks: what kvcache.store.Store holds, as the kernels read it."""

    kind: str
    codes: torch.Tensor  # f16 values, or int32 words: (block, head row, tile, token, columns)
    scale: torch.Tensor  # float16 (block, head row, tile, token, 1); of f16 the values themselves

    @staticmethod
    def of(kind: str, planes: Mapping[str, torch.Tensor]) -> CachePlanes:
        if kind == "f16":
            return CachePlanes(kind, planes["values"], planes["values"])
        return CachePlanes(kind, planes["codes"].view(torch.int32), planes["scale"])


@dataclass(frozen=True, eq=False)
class Tables:
    """Where the rows of a batch find their context. All int32, on the device; data, not shape."""

    blocks: torch.Tensor  # (tables, most blocks): of each sequence
    firsts: torch.Tensor  # (tables,): the position that the table starts with
    row_table: torch.Tensor  # (rows,)
    row_position: torch.Tensor  # (rows,)


@dataclass(frozen=True)
class Tuning:
    """How the kernel is launched: programs in all, and registers of a thread where the compiler would take more."""

    n_programs: int
    registers: int | None = None
    stages: int = 3

    def n_splits(self, n_rows: int, n_kv_heads: int) -> int:
        return max(1, self.n_programs // max(1, n_rows * n_kv_heads))


# One wave on an H200, at blocks of 32 tokens; measured by benchmarks/cuda_model.py.
TUNINGS = {"f16": Tuning(512, 168), "q8_0": Tuning(1024, 168), "q4_0": Tuning(1024, 168)}


@dataclass(frozen=True, eq=False)
class Shares:
    """What programs leave for `combine`: of each row, head and split."""

    values: torch.Tensor  # float32 (rows, heads, splits, dim)
    peaks: torch.Tensor  # float32 (rows, heads, splits)
    sums: torch.Tensor  # float32 (rows, heads, splits)
    min_blocks: int  # that a split takes, so that short contexts are not cut up

    @staticmethod
    def empty(
        n_rows: int, n_heads: int, n_splits: int, dim: int, device: torch.device | str, min_blocks: int = 4
    ) -> Shares:
        values = torch.empty(n_rows, n_heads, n_splits, dim, device=device)
        peaks, sums = (torch.empty(n_rows, n_heads, n_splits, device=device) for _ in range(2))
        return Shares(values, peaks, sums, min_blocks)


def supports(k_kind: str, v_kind: str, head_dim: int, group: int, block_size: int) -> str | None:
    if k_kind not in KINDS or v_kind not in KINDS:
        return f"no kernel for a cache of {k_kind} and {v_kind}"
    if head_dim % 32 or head_dim & (head_dim - 1) or head_dim < 64:
        return f"head dim {head_dim} is no power of two from 64"
    if group > ROWS:
        return f"{group} query heads share a KV head, more than {ROWS}"
    if block_size < 16 or block_size & (block_size - 1):
        return f"blocks of {block_size} tokens are no power of two from 16"
    return None


def attend(
    q: torch.Tensor,
    keys: CachePlanes,
    values: CachePlanes,
    head_rows: slice,
    tables: Tables,
    out: Shares,
    *,
    scale: float,
    window: int | None = None,
    tuning: Tuning | None = None,
) -> Shares:
    """q (rows, heads, dim) float32 over the KV heads `head_rows` of the cache → shares."""
    n_rows, n_heads, dim = q.shape
    n_kv_heads, block_size = head_rows.stop - head_rows.start, keys.codes.shape[3]
    reason = supports(keys.kind, values.kind, dim, n_heads // n_kv_heads, block_size)
    assert reason is None, reason
    assert q.dtype == torch.float32
    assert q.is_contiguous()
    n_splits = out.peaks.shape[2]
    tuning = tuning or TUNINGS[values.kind]
    limits = {} if tuning.registers is None else {"maxnreg": tuning.registers}
    _attend[(n_kv_heads, n_splits, n_rows)](
        q, keys.codes, keys.scale, values.codes, values.scale,
        tables.blocks, tables.row_table, tables.row_position, tables.firsts,
        out.values, out.peaks, out.sums, tables.blocks.shape[1], keys.codes.shape[1], head_rows.start,
        window or 2**30, scale * LOG2E, n_splits, out.min_blocks,
        K_KIND=keys.kind, V_KIND=values.kind, G=n_heads // n_kv_heads, DIM=dim, BS=block_size,
        PLAIN=INTERPRETED, num_warps=1, num_stages=tuning.stages, **limits,
    )  # fmt: skip
    return out
