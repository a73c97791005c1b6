"""The gated delta rule for sequences with many rows: chunks of 64 rows as matrix products.

Within a chunk, with the state S before it, decays g, their sums G_r = g_0 + … + g_r, and strengths β, row r changes the
state by δ_r = β_r · (v_r - e^G_r · Sᵀ·k_r - Σ over j < r of e^(G_r - G_j) · (k_r·k_j) · δ_j). As matrices:

    (I + A) · Δ = β·V - (β·e^G·K) · S        A_rj = β_r · e^(G_r - G_j) · (k_r·k_j) for j < r
    Δ = U - W·S                              U = (I + A)⁻¹ · β·V,   W = (I + A)⁻¹ · β·e^G·K
    out = (e^G·Q)·S + P·Δ                    P_rj = e^(G_r - G_j) · (q_r·k_j) for j ≤ r
    S ← e^G_last · S + Kᵀ · e^(G_last - G) · Δ

    prepare_chunks   U, W and P of every chunk at once: they do not depend on the state
    scan_chunks      S and the output, chunk after chunk; a program has some columns of one head's S

No exponent is positive. I + A is inverted row by row: exact for equal keys, too, where a series of powers of A would
overflow. Products are tf32's, of operands that are rounded before: the hardware would cut them off, and the state would
drift. A chunk ends where the state is stored, so that rows that stay pending are a chunk of their own. Sequences with
few rows are left to `delta_net`, whose reference and arguments these kernels share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from motley.backends.cuda.kernels.overlap import let_next_start, wait
from motley.backends.cuda.kernels.spans import load_span

MIN_ROWS = 17  # of a sequence that is computed in chunks
CHUNK = tl.constexpr(64)


@triton.jit
def gates_of(
    a, b, offset, factor, row, head, row_stride, key_stride, inside, EACH: tl.constexpr, COMPUTES: tl.constexpr
):  # fmt: skip
    """decay and beta of rows, one or several; 0 where they are not `inside`."""
    at = row * row_stride + head // EACH * key_stride + head % EACH
    x, y = tl.load(a + at, inside, other=0.0), tl.load(b + at, inside, other=0.0)
    if COMPUTES:
        x += tl.load(offset + head)
        x = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))) * tl.load(factor + head)
        y = 1.0 / (1.0 + tl.exp(-y))
    return tl.where(inside, x, 0.0), tl.where(inside, y, 0.0)


@triton.jit
def key_head(head, HEADS: tl.constexpr, KEYS: tl.constexpr, CYCLIC: tl.constexpr):
    """The key head of a value head."""
    return head % KEYS if CYCLIC else head // (HEADS // KEYS)


@triton.jit
def _chunk_rows(c, n_rows, n_folded):
    """The first row of chunk c of a sequence, and how many rows it has; 0: there is no such chunk."""
    n_before = tl.cdiv(n_folded, CHUNK)  # chunks before the state is stored
    is_before = c < n_before
    start = tl.where(is_before, c * CHUNK, n_folded + (c - n_before) * CHUNK)
    return start, tl.minimum(tl.where(is_before, n_folded, n_rows) - start, CHUNK)


@triton.jit
def _units(x, row, column, inside, eps, W: tl.constexpr):
    """Rows of x from `column` on, (rows, dims), each divided by its length."""
    v = tl.load(x + row[:, None] * W + column, inside, other=0.0)
    return v * tl.rsqrt(tl.sum(v * v, 1) + eps)[:, None]


@triton.jit
def _product(x, y):
    return tl.dot(_rounded(x), _rounded(y), input_precision="tf32")


@triton.jit
def _rounded(x):
    """float32 with the 10 bits of mantissa that tf32 has, rounded to the nearest."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(lower, n):
    """(I + A)⁻¹ for a strictly lower A, given as `lower` = Aᵀ; its first n rows. Row i: e_i - A_i · (rows before)."""
    r, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    found = tl.where(r == j, 1.0, 0.0)
    for i in range(1, n):
        row = tl.sum(tl.where(j == i, lower, 0.0), 1)  # A_i, by rows of `found`
        new = tl.where(tl.arange(0, CHUNK) == i, 1.0, 0.0) - tl.sum(row[:, None] * found, 0)
        found = tl.where(r == i, new[None, :], found)
    return found


@triton.jit(do_not_specialize=["row_stride", "key_stride"])
def prepare_chunks(
    mixed, a, b, offset, factor, spans, u, w, p, eps, scale, row_stride, key_stride,
    HEADS: tl.constexpr, KEYS: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    EACH: tl.constexpr, CYCLIC: tl.constexpr, COMPUTES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """u (rows, heads, value dim), w (rows, heads, key dim), p · scale (rows, heads, CHUNK), of one chunk."""
    let_next_start()
    wait()
    first_row, n_rows, position, _, _, _, _, n_written, _ = load_span(spans, tl.program_id(0))
    start, n = _chunk_rows(tl.program_id(1), n_rows, n_written - position)
    head = tl.program_id(2)
    if (n_rows >= LIMIT) & (n > 0):
        WIDTH: tl.constexpr = 2 * KEYS * KD + HEADS * VD
        key = key_head(head, HEADS, KEYS, CYCLIC)
        i, d, c = tl.arange(0, CHUNK), tl.arange(0, D), tl.arange(0, V)
        inside, row = i < n, first_row + start + i
        in_key, in_value = inside[:, None] & (d < KD)[None, :], inside[:, None] & (c < VD)[None, :]
        decay, beta = gates_of(
            a, b, offset, factor, row, head, row_stride, key_stride, inside, EACH, COMPUTES
        )
        total = tl.cumsum(decay, 0)
        place = row * HEADS + head
        k = _units(mixed, row, (KEYS + key) * KD + d[None, :], in_key, eps, WIDTH)
        q = _units(mixed, row, key * KD + d[None, :], in_key, eps, WIDTH)
        seen = i[:, None] >= i[None, :]
        decay_factor = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
        scores = _product(q, tl.trans(k)) * scale
        at = place[:, None] * CHUNK + i[None, :]
        tl.store(p + at, tl.where(seen, scores * decay_factor, 0.0), inside[:, None] & (i >= 0)[None, :])
        later = i[None, :] > i[:, None]  # (j, r): j before r
        decay_factor = tl.exp(tl.where(later, total[None, :] - total[:, None], 0.0))
        same = _product(k, tl.trans(k))
        inverse = _inverse(tl.where(later, same * decay_factor * beta[None, :], 0.0), n)
        at = place[:, None] * KD + d[None, :]
        k *= (beta * tl.exp(total))[:, None]
        tl.store(w + at, _product(inverse, k), in_key)
        at = mixed + row[:, None] * WIDTH + (2 * KEYS * KD + head * VD + c[None, :])
        v = tl.load(at, in_value, other=0.0) * beta[:, None]
        at = place[:, None] * VD + c[None, :]
        tl.store(u + at, _product(inverse, v), in_value)


@triton.jit(do_not_specialize=["ring_size", "row_stride", "key_stride"])
def scan_chunks(
    mixed, a, b, offset, factor, states, rings, spans, u, w, p, out, ring_size, eps, scale, row_stride, key_stride,
    HEADS: tl.constexpr, KEYS: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    EACH: tl.constexpr, CYCLIC: tl.constexpr, COMPUTES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Scans C columns of a head's S of a sequence."""
    let_next_start()
    wait()
    first_row, n_rows, position, source, n_read, source_ring, target, n_written, _ = load_span(
        spans, tl.program_id(0)
    )
    head = tl.program_id(1)
    if n_rows >= LIMIT:
        WIDTH: tl.constexpr = 2 * KEYS * KD + HEADS * VD
        n_folded = n_written - position
        key = key_head(head, HEADS, KEYS, CYCLIC)
        i, d, c = tl.arange(0, CHUNK), tl.arange(0, D), tl.program_id(2) * C + tl.arange(0, C)
        inside = (d < KD)[:, None] & (c < VD)[None, :]
        place = (head * KD + d)[:, None] * VD + c[None, :]
        s = load_state(states, source, place, inside, HEADS * KD * VD)
        s = fold_pending(s, rings, head, d, c, n_read, position, source_ring, ring_size, HEADS, KD, VD)
        kept = states + target * (HEADS * KD * VD) + place
        if n_folded == 0:
            tl.store(kept, s.to(states.dtype.element_ty), inside)
        n_before = tl.cdiv(n_folded, CHUNK)
        for number in range(n_before + tl.cdiv(n_rows - n_folded, CHUNK)):
            start, n = _chunk_rows(number, n_rows, n_folded)
            is_row, row = i < n, first_row + start + i
            in_key, in_value = is_row[:, None] & (d < KD)[None, :], is_row[:, None] & (c < VD)[None, :]
            at = row * HEADS + head
            to_keys = tl.load(w + at[:, None] * KD + d[None, :], in_key, other=0.0)
            delta = tl.load(u + at[:, None] * VD + c[None, :], in_value, other=0.0)
            scores = tl.load(
                p + at[:, None] * CHUNK + i[None, :], is_row[:, None] & (i >= 0)[None, :], other=0.0
            )
            q = _units(mixed, row, key * KD + d[None, :], in_key, eps, WIDTH)
            k = _units(mixed, row, (KEYS + key) * KD + d[None, :], in_key, eps, WIDTH)
            decay = gates_of(a, b, offset, factor, row, head, row_stride, key_stride, is_row, EACH, COMPUTES)[
                0
            ]
            total, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
            delta -= _product(to_keys, s)
            result = _product(q * (tl.exp(total) * scale)[:, None], s)
            result += _product(scores, delta)
            tl.store(out + at[:, None] * VD + c[None, :], result, in_value)
            k *= tl.exp(last - total)[:, None]
            s = tl.exp(last) * s + _product(tl.trans(k), delta)
            if number + 1 == n_before:
                tl.store(kept, s.to(states.dtype.element_ty), inside)


@triton.jit
def load_state(states, source, place, inside, SIZE: tl.constexpr):
    """Some columns of a head's S in slot `source`; zeros where that is -1."""
    s = tl.load(states + source * SIZE + place, inside & (source >= 0), other=0.0)
    return s.to(tl.float32)


@triton.jit
def fold_pending(
    s, rings, head, d, c, n_read, position, source_ring, ring_size,
    HEADS: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr,
):  # fmt: skip
    """S after the pending tokens, from their ring."""
    for p in range(n_read, position):
        token = rings + ((source_ring * ring_size + p % ring_size) * HEADS + head) * (KD + VD + 2)
        k = tl.load(token + d, d < KD, other=0.0)
        v = tl.load(token + KD + c, c < VD, other=0.0)
        decay_factor = tl.exp(tl.load(token + KD + VD))
        delta = tl.load(token + KD + VD + 1) * (v - decay_factor * tl.sum(s * k[:, None], 0))
        s = decay_factor * s + k[:, None] * delta[None, :]
    return s
