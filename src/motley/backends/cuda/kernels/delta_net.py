"""The gated delta rule: for each value head with the matrix S (key dim, value dim), row after row of a sequence,

    m = Sᵀ·k, o = Sᵀ·q          delta = beta · (v - e^decay · m)
    out = (e^decay · o + (k·q) · delta) / sqrt(key dim)          S ← e^decay · S + k · deltaᵀ

Columns of S are independent: a program has some columns of one head's S of one sequence in registers while it goes
through all rows. Pending tokens come first, from their ring. q and k are divided by their length. With `gates`, decay
and beta are computed here: decay = factor · softplus(a + offset), beta = σ(b). `_delta_pending` stores what a later
batch needs of rows that stay pending, when no program reads the ring any more. Spans: kvcache.state_arena.StateSpan;
one without rows is padding. Prompts: `delta_chunks`. Reference: graph.ops.DeltaNet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.delta_chunks import (
    CHUNK,
    MIN_ROWS,
    fold_pending,
    gates_of,
    key_head,
    load_state,
    prepare_chunks,
    scan_chunks,
)
from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.spans import load_span

_COLUMNS = 8  # of a program: one sector of memory
_PREPARE_WARPS = 8
_SCAN_COLUMNS, _SCAN_WARPS = 32, 8  # of a program that goes through chunks; measured on an H200


@dataclass(frozen=True, eq=False)
class Gates:
    """The inputs of which decay and beta are made. a and b: (rows, …, n): value head h is at [row, h // n, h % n]."""

    a: torch.Tensor
    b: torch.Tensor
    offset: torch.Tensor  # (heads,)
    factor: torch.Tensor  # (heads,)


@triton.jit
def _unit(x, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit(do_not_specialize=["ring_size", "row_stride", "key_stride", "limit"])
def _delta_net(
    mixed, a, b, offset, factor, states, rings, spans, out, ring_size, eps, scale, row_stride, key_stride, limit,
    HEADS: tl.constexpr, KEYS: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    EACH: tl.constexpr, CYCLIC: tl.constexpr, COMPUTES: tl.constexpr,
):  # fmt: skip
    """The recurrent form, for sequences with fewer than `limit` rows."""
    let_next_start()
    wait()
    first_row, n_rows, position, source, n_read, source_ring, target, n_written, _ = load_span(
        spans, tl.program_id(0)
    )
    head = tl.program_id(1)
    if (n_rows > 0) & (n_rows < limit):
        n_folded = n_written - position
        key = key_head(head, HEADS, KEYS, CYCLIC)
        d, c = tl.arange(0, D), tl.program_id(2) * C + tl.arange(0, C)
        in_key, in_value = d < KD, c < VD
        inside = in_key[:, None] & in_value[None, :]
        place = (head * KD + d)[:, None] * VD + c[None, :]
        s = load_state(states, source, place, inside, HEADS * KD * VD)
        s = fold_pending(s, rings, head, d, c, n_read, position, source_ring, ring_size, HEADS, KD, VD)
        kept = states + target * (HEADS * KD * VD) + place
        if n_folded == 0:
            tl.store(kept, s.to(states.dtype.element_ty), inside)
        W: tl.constexpr = 2 * KEYS * KD + HEADS * VD
        at = mixed + first_row * W
        q = tl.load(at + key * KD + d, in_key, other=0.0)
        k = tl.load(at + (KEYS + key) * KD + d, in_key, other=0.0)
        v = tl.load(at + 2 * KEYS * KD + head * VD + c, in_value, other=0.0)
        decay, beta = gates_of(
            a, b, offset, factor, first_row, head, row_stride, key_stride, True, EACH, COMPUTES
        )
        for i in range(n_rows):
            # The next row is loaded while this one is computed.
            more = i + 1 < n_rows
            following = first_row + tl.where(more, i + 1, i)
            at = mixed + following * W
            next_q = tl.load(at + key * KD + d, in_key, other=0.0)
            next_k = tl.load(at + (KEYS + key) * KD + d, in_key, other=0.0)
            next_v = tl.load(at + 2 * KEYS * KD + head * VD + c, in_value, other=0.0)
            next_decay, next_beta = gates_of(
                a, b, offset, factor, following, head, row_stride, key_stride, True, EACH, COMPUTES
            )
            q, k, decay_factor = _unit(q, eps), _unit(k, eps), tl.exp(decay)
            delta = beta * (v - decay_factor * tl.sum(s * k[:, None], 0))
            result = decay_factor * tl.sum(s * q[:, None], 0) + tl.sum(k * q, 0) * delta
            s = decay_factor * s + k[:, None] * delta[None, :]
            tl.store(out + ((first_row + i) * HEADS + head) * VD + c, result * scale, in_value)
            if i + 1 == n_folded:
                tl.store(kept, s.to(states.dtype.element_ty), inside)
            q, k, v, decay, beta = next_q, next_k, next_v, next_decay, next_beta


@triton.jit(do_not_specialize=["ring_size", "row_stride", "key_stride"])
def _delta_pending(
    mixed, a, b, offset, factor, rings, spans, ring_size, eps, row_stride, key_stride,
    HEADS: tl.constexpr, KEYS: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    EACH: tl.constexpr, CYCLIC: tl.constexpr, COMPUTES: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait()
    first_row, n_rows, position, _, _, _, _, n_written, target_ring = load_span(spans, tl.program_id(0))
    head = tl.program_id(1)
    if n_rows > 0:
        key = key_head(head, HEADS, KEYS, CYCLIC)
        d, c = tl.arange(0, D), tl.arange(0, V)
        W: tl.constexpr = 2 * KEYS * KD + HEADS * VD
        for p in range(n_written, position + n_rows):
            row = first_row + p - position
            at = mixed + row * W
            k = _unit(tl.load(at + (KEYS + key) * KD + d, d < KD, other=0.0), eps)
            v = tl.load(at + 2 * KEYS * KD + head * VD + c, c < VD, other=0.0)
            decay, beta = gates_of(
                a, b, offset, factor, row, head, row_stride, key_stride, True, EACH, COMPUTES
            )
            token = rings + ((target_ring * ring_size + p % ring_size) * HEADS + head) * (KD + VD + 2)
            tl.store(token + d, k, d < KD)
            tl.store(token + KD + c, v, c < VD)
            tl.store(token + KD + VD, decay)
            tl.store(token + KD + VD + 1, beta)


def delta_net(
    mixed: torch.Tensor,
    gates: Gates | tuple[torch.Tensor, torch.Tensor],
    states: torch.Tensor,
    rings: torch.Tensor,
    spans: torch.Tensor,
    *,
    eps: float,
    is_cyclic: bool,
) -> torch.Tensor:
    """mixed (rows, q | k | v) float32, gates or (decay, beta) (rows, heads) → (rows, heads, value dim).

    states: (slots, heads, key dim, value dim); rings: (rings, tokens, heads, k | v | decay | beta) float32; spans:
    int32 (sequences, 9). Rows of no span are undefined.
    """
    _, heads, key_dim, value_dim = states.shape
    keys = (mixed.shape[1] - heads * value_dim) // (2 * key_dim)
    assert mixed.is_contiguous()
    out = torch.empty(mixed.shape[0], heads, value_dim, device=mixed.device)
    ring_size = max(1, rings.shape[1])
    if isinstance(gates, Gates):
        a, b, offset, factor = gates.a, gates.b, gates.offset, gates.factor
    else:
        (a, b), offset, factor = gates, mixed, mixed
    assert a.stride() == b.stride()
    assert a.stride(-1) == 1
    each = a.shape[-1]
    strides = a.stride(0), a.stride(1) if a.dim() == 3 else 0
    sizes = {
        "HEADS": heads, "KEYS": keys, "KD": key_dim, "VD": value_dim, "D": max(16, triton.next_power_of_2(key_dim)),
        "EACH": each, "CYCLIC": is_cyclic, "COMPUTES": isinstance(gates, Gates), **overlapping(),
    }  # fmt: skip
    given, numbers = (mixed, a, b, offset, factor), (eps, key_dim**-0.5, *strides)
    # In a decode batch there are as many spans as rows, some of them padding.
    has_prompts = mixed.shape[0] >= MIN_ROWS and len(spans) < mixed.shape[0]
    limit = MIN_ROWS if has_prompts else 2**30
    _delta_net[(len(spans), heads, triton.cdiv(value_dim, _COLUMNS))](
        *given, states, rings, spans, out, ring_size, *numbers, limit, C=_COLUMNS, num_warps=1, **sizes
    )
    if has_prompts:
        _by_chunks(given, states, rings, spans, out, ring_size, numbers, **sizes)
    if rings.numel():
        _delta_pending[(len(spans), heads)](
            mixed, a, b, offset, factor, rings, spans, ring_size, eps, *strides,
            V=triton.next_power_of_2(value_dim), num_warps=1, **sizes,
        )  # fmt: skip
    return out


def _by_chunks(
    given: tuple[torch.Tensor, ...],
    states: torch.Tensor,
    rings: torch.Tensor,
    spans: torch.Tensor,
    out: torch.Tensor,
    ring_size: int,
    numbers: tuple[float, ...],
    **sizes: Any,
) -> None:
    """The sequences with at least MIN_ROWS rows."""
    (n_rows, heads, value_dim), key_dim = out.shape, states.shape[2]
    u, w, p = (torch.empty(n_rows, heads, n, device=out.device) for n in (value_dim, key_dim, CHUNK.value))
    n_chunks = triton.cdiv(n_rows, CHUNK.value) + 1  # at most, of one sequence
    prepare_chunks[(len(spans), n_chunks, heads)](
        *given, spans, u, w, p, *numbers,
        V=max(16, triton.next_power_of_2(value_dim)), LIMIT=MIN_ROWS, num_warps=_PREPARE_WARPS, **sizes,
    )  # fmt: skip
    scan_chunks[(len(spans), heads, triton.cdiv(value_dim, _SCAN_COLUMNS))](
        *given, states, rings, spans, u, w, p, out, ring_size, *numbers,
        C=_SCAN_COLUMNS, LIMIT=MIN_ROWS, num_warps=_SCAN_WARPS, num_stages=1, **sizes,
    )  # fmt: skip
