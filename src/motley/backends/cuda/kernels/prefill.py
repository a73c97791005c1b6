"""Attention of a sequence's many queries over the packed, paged cache: softmax(scale · q·Kᵀ)·V, causal.

A program takes one head and a *span*, neighbouring rows of one sequence, and walks over what these see; all sequences
of a batch are one launch. One or two blocks at a time are unpacked (`operand`). Blocks that every query of the span
sees whole need no mask. With `rotate`, results are rotated back by the Hadamard matrix.

Dims are in the order in which words hold them (`order_of`): the same for queries and keys, so that products are right,
and undone where results are stored. It only swaps bits of a dim's number, which the Hadamard matrix does not mind.
Base 2 throughout: the queries carry scale · log₂e. Reference: graph.ops.Attention.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.attention import LOG2E, look_up, with_sink
from motley.backends.cuda.kernels.bits import INTERPRETED, byte_as_half, nibbles_as_halves
from motley.backends.cuda.kernels.hadamard import rotated
from motley.backends.cuda.kernels.pipeline import launch
from motley.backends.cuda.kernels.tiles import (
    TILE,
    CachePlanes,
    is_fast,
    is_plain,
    is_words,
    load_columns,
    load_scales,
    n_columns,
    n_parts,
    operand,
    spread,
)

SPAN_NUMBERS = 4  # of each span: its first row, how many, the first one's position, where its table begins


def max_span_rows(k_kind: str, v_kind: str, dim: int) -> int:
    """The most rows of a span. With more rows, fewer programs unpack the same block; plain values are faster with
    fewer, and large heads leave no room for more.
    """
    return 64 if (is_plain(k_kind) and is_plain(v_kind)) or dim > 128 else 128


def span_rows(n_rows: int, most: int) -> int:
    """Rows of spans, where no sequence has more than `n_rows`: 16, 64 or the most, a compiled variant each."""
    return min(most, 16 if n_rows <= 16 else 64 if n_rows <= 64 else most)


def spans(first_row: int, n_rows: int, position: int, table: int, size: int) -> npt.NDArray[np.int32]:
    """(spans, SPAN_NUMBERS) of a sequence, `size` rows each. Those that see most come first."""
    starts = np.arange(0, n_rows, size, dtype=np.int32)[::-1]
    counts = np.minimum(n_rows - starts, size)
    return np.stack([first_row + starts, counts, position + starts, np.full_like(starts, table)], 1)


@triton.constexpr_function
def n_dims(kind, n_tiles):
    """Dims of a head, padded."""
    return n_columns(kind, n_tiles) * n_parts(kind)


@triton.jit
def order_of(c, KIND: tl.constexpr):
    """Which dims `load_block` has in places c."""
    if KIND == "q4_0":
        return c // 32 * 32 + c // 8 % 4 * 4 + c // 4 % 2 * 16 + c % 4
    else:
        return c


@triton.jit
def _in_turns(a, b):
    """Rows of a and b (columns, tokens), one of each at a time."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [2 * a.shape[0], a.shape[1]])


@triton.jit
def _values(words, i: tl.constexpr, scale, KIND: tl.constexpr, PLAIN: tl.constexpr):
    """Values of byte i of words: over 0x6400, a code is 1024 more than itself, an upper nibble 1024 + 16 times."""
    if KIND == "q8_0":
        return (byte_as_half(words, i, 0x6400, PLAIN) - 1152.0) * scale
    else:
        low, high = nibbles_as_halves(words, i, 0x6400, PLAIN)
        return _in_turns((low - 1032.0) * scale, (high * 0.0625 - 72.0) * scale)


@triton.jit
def load_block(planes, at, KIND: tl.constexpr, TILES: tl.constexpr, BS: tl.constexpr, PLAIN: tl.constexpr):
    """One head in one or two blocks (see `load_columns`): (dims in `order_of`, tokens) of type `operand`."""
    x = load_columns(planes, at, KIND, TILES, BS)
    if is_words(KIND):
        scale = spread(load_scales(planes, at, KIND, TILES, BS), KIND)
        even = _in_turns(_values(x, 0, scale, KIND, PLAIN), _values(x, 2, scale, KIND, PLAIN))
        odd = _in_turns(_values(x, 1, scale, KIND, PLAIN), _values(x, 3, scale, KIND, PLAIN))
        return _in_turns(even, odd)
    else:
        return x


@triton.jit(do_not_specialize=["head_rows", "first_row", "window", "n_skipped"])
def _prefill(
    q, keys, values, tables, spans, sinks, out, sums, head_rows, first_row, window, n_skipped, factor,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr,
    SIZE: tl.constexpr, N: tl.constexpr, WINDOWED: tl.constexpr, ROTATION: tl.constexpr, LOG_ROTATION: tl.constexpr,
    HAS_SINKS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    head, span = tl.program_id(1), spans + tl.program_id(0) * 4
    row, n = tl.load(span).to(tl.int64), tl.load(span + 1)
    position, table = tl.load(span + 2), tl.load(span + 3)
    first = tl.load(tables + table)  # the position that the table starts with
    tables += table + 1
    last = position + n - 1
    begin = (tl.maximum(tl.maximum(position - window + 1, n_skipped), first) - first) // BS
    end = (last - first) // BS + 1
    # Rounds that end before the first query does.
    n_whole = tl.maximum((position - first + 1) // BS - begin, 0) // N
    if WINDOWED:
        n_whole = 0

    TILES: tl.constexpr = (DIM + 31) // 32
    K_DIMS: tl.constexpr = n_dims(K_KIND, TILES)
    V_DIMS: tl.constexpr = n_dims(V_KIND, TILES)
    T: tl.constexpr = N * BS
    m = tl.arange(0, SIZE)
    line = (row + m)[:, None] * (tl.num_programs(1) * DIM) + head * DIM
    d = order_of(tl.arange(0, K_DIMS), K_KIND)[None, :]
    x = tl.load(q + line + d, (m < n)[:, None] & (d < DIM), other=0.0)
    x = (x * factor).to(operand(K_KIND))
    acc, total = tl.zeros([SIZE, V_DIMS], tl.float32), tl.zeros([SIZE], tl.float32)
    peak = tl.full([SIZE], -float("inf"), tl.float32)
    lane = first_row + head // GROUP
    for masked in tl.static_range(2):
        start = begin + n_whole * N if masked else begin
        stop = end if masked else begin + n_whole * N
        blocks = look_up(
            tables, start, tl.maximum(end, 1), N
        )  # a span without context has a table all the same
        for b in range(start, stop, N):
            at = ()
            for i in tl.static_range(N):
                at = at + (blocks[i].to(tl.int64) * head_rows + lane,)  # type: ignore[assignment]
            blocks = look_up(tables, b + N, end, N)
            s = tl.dot(x, load_block(keys, at, K_KIND, TILES, BS, PLAIN))
            v = load_block(values, at, V_KIND, TILES, BS, PLAIN)
            if masked:
                key = first + b * BS + tl.arange(0, T)
                distance = (position + m)[:, None] - key[None, :]
                s = tl.where((distance >= 0) & (distance < window), s, -float("inf"))
                v = tl.where((key <= last)[None, :], v, 0.0)  # other slots may hold anything
            top = tl.maximum(peak, tl.max(s, 1))
            base = tl.where(top == -float("inf"), 0.0, top)  # of a query that has seen nothing yet
            p, rescale = tl.exp2(s - base[:, None]), tl.exp2(peak - base)
            total, peak = total * rescale + tl.sum(p, 1), top
            acc = tl.dot(p.to(operand(V_KIND)), tl.trans(v), acc * rescale[:, None])
    tl.store(sums + (row + m) * tl.num_programs(1) + head, peak + tl.log2(total), m < n)
    if HAS_SINKS:
        rescale, total = with_sink(total, peak, tl.load(sinks + head))
        acc *= rescale[:, None]
    acc = acc / total[:, None]
    if ROTATION > 1:
        ALL: tl.constexpr = SIZE * V_DIMS
        acc = tl.reshape(rotated(tl.reshape(acc, [ALL]), ALL, ROTATION, LOG_ROTATION), [SIZE, V_DIMS])
    d = order_of(tl.arange(0, V_DIMS), V_KIND)[None, :]
    tl.store(out + line + d, acc, (m < n)[:, None] & (d < DIM))


def prefill(
    q: torch.Tensor,
    keys: CachePlanes,
    values: CachePlanes,
    head_rows: slice,
    tables: torch.Tensor,
    spans: torch.Tensor,
    out: torch.Tensor,
    *,
    span_rows: int,
    scale: float,
    window: int | None = None,
    rotate: bool = False,
    rotation: int | None = None,
    sinks: torch.Tensor | None = None,
    n_skipped: int = 0,
) -> torch.Tensor:
    """q (rows, heads, dim) float32 over the KV heads `head_rows` of the cache → the same rows of out, for all `spans`.

    A table is, in `tables` (int32), the position that it starts with and its block ids. `rotation`: the size of the
    rotation, where it is not the head's. `sinks`: (heads,) one more score for each head, without a value. `n_skipped`:
    positions, whole blocks, that are left out at the beginning.
    Returns, for the same rows, float32 (rows, heads): log₂ of the sum of 2^score, without sinks.
    """
    _, n_heads, dim = q.shape
    group, rotation = n_heads // (head_rows.stop - head_rows.start), (rotation or dim) if rotate else 1
    assert keys.n_tiles == values.n_tiles == triton.cdiv(dim, TILE)
    assert q.shape == out.shape
    assert q.dtype == out.dtype == torch.float32
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert spans.shape[1:] == (SPAN_NUMBERS,)
    assert spans.is_contiguous()
    assert dim % rotation == rotation & (rotation - 1) == 0, "only powers of two have a Hadamard matrix"
    assert n_skipped % keys.block_size == 0
    sums = torch.empty(q.shape[:2], device=q.device)
    # Values that are unpacked one by one are not worth the memory of a pipeline.
    n_stages = 3 if is_fast(keys.kind) and is_fast(values.kind) else 1
    launch(
        _prefill[(len(spans), n_heads)],
        q, keys.pointers, values.pointers, tables, spans, q if sinks is None else sinks, out, sums,
        keys.codes.shape[1], head_rows.start, window or 2**30, n_skipped, scale * LOG2E,
        K_KIND=keys.kind, V_KIND=values.kind, GROUP=group, DIM=dim, BS=keys.block_size, SIZE=span_rows,
        N=2 if keys.block_size <= 32 else 1, WINDOWED=window is not None, ROTATION=rotation,
        LOG_ROTATION=rotation.bit_length() - 1, HAS_SINKS=sinks is not None, PLAIN=INTERPRETED,
        num_warps=4, num_stages=n_stages,
    )  # fmt: skip
    return sums
