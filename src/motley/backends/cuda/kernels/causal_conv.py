"""The causal convolution of recurrent layers: out = silu(Σ over taps of weight · the latest inputs), per channel.

The inputs that a row reads may lie in three places, oldest first: the state (taps - 1 rows), the ring of pending
tokens, the batch. One program has some channels of some rows of one sequence. Only that of its first rows reads the
state and the ring, so that it has read everything before it stores the new ones. Spans:
kvcache.state_arena.StateSpan; one without rows is padding. Reference: graph.ops.CausalConv.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.spans import load_span

_PART = 64  # rows of a program in a prompt; at least taps - 1


@triton.jit
def _line(
    x, states, rings, at, ok, c, inside, source, n_read, n_pend, source_ring, first_row, ring_size,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Rows `at` (R, 1) of a sequence's inputs, from the state's first row on; (R, C)."""
    in_state, in_ring = at < TAPS - 1, (at >= TAPS - 1) & (at < TAPS - 1 + n_pend)
    here = ok & inside
    window = tl.load(
        states + (source * (TAPS - 1) + at) * CHANNELS + c, here & in_state & (source >= 0), other=0.0
    )
    token = at - (TAPS - 1)
    place = source_ring * ring_size + (n_read + token) % ring_size
    pending = tl.load(rings + place * CHANNELS + c, here & in_ring, other=0.0)
    row = first_row + token - n_pend
    own = tl.load(x + row * CHANNELS + c, here & (token >= n_pend), other=0.0)
    return window.to(tl.float32) + pending + own  # two of them are zeros


@triton.jit(do_not_specialize=["ring_size"])
def _causal_conv(
    x, weight, states, rings, spans, out, ring_size,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, STATE_ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    MAX_PENDING: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait()
    first_row, n_rows, position, source, n_read, source_ring, target, n_written, target_ring = load_span(
        spans, tl.program_id(0)
    )
    part = tl.program_id(2)
    if n_rows > part * PART:
        n_pend = position - n_read
        c = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
        inside = c < CHANNELS
        r = tl.arange(0, R)[:, None]
        for first in range(part * PART, tl.minimum(n_rows, (part + 1) * PART), R):
            ok = first + r < n_rows
            total = tl.zeros([R, C], tl.float32)
            for t in tl.static_range(TAPS):
                w = tl.load(weight + c * TAPS + t, inside, other=0.0)
                total += w * _line(
                    x, states, rings, n_pend + first + r + t, ok, c, inside, source, n_read, n_pend, source_ring,
                    first_row, ring_size, CHANNELS, TAPS,
                )  # fmt: skip
            total = total / (1.0 + tl.exp(-total))
            tl.store(out + (first_row + first + r) * CHANNELS + c, total, ok & inside)
        if part == 0:
            # Everything is read before anything of the state is written: source and target may be the same.
            kept = tl.arange(0, STATE_ROWS)[:, None]
            state = _line(
                x, states, rings, n_written - n_read + kept, kept < TAPS - 1, c, inside, source, n_read, n_pend,
                source_ring, first_row, ring_size, CHANNELS, TAPS,
            )  # fmt: skip
            p = n_written + tl.arange(0, MAX_PENDING)[:, None]
            stays = p < position + n_rows
            later = tl.load(x + (first_row + p - position) * CHANNELS + c, stays & inside, other=0.0)
            tl.debug_barrier()
            at = states + (target * (TAPS - 1) + kept) * CHANNELS + c
            tl.store(at, state.to(states.dtype.element_ty), (kept < TAPS - 1) & inside)
            tl.store(rings + (target_ring * ring_size + p % ring_size) * CHANNELS + c, later, stays & inside)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, rings: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    """x (rows, channels), weight (channels, taps) float32 → (rows, channels); rows of no span are undefined.

    states: (slots, taps - 1, channels); rings: (rings, tokens, channels) float32; spans: int32 (sequences, 9).
    """
    (n_rows, channels), taps, ring_size = x.shape, weight.shape[1], rings.shape[1]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert states.shape[1:] == (taps - 1, channels)
    out = torch.empty_like(x)
    many = n_rows >= 16 and len(spans) < n_rows  # in a decode batch there are as many spans as rows
    size = _PART if many else 1 << 30
    _causal_conv[(len(spans), triton.cdiv(channels, 64), triton.cdiv(n_rows, size))](
        x, weight, states, rings, spans, out, max(1, ring_size),
        CHANNELS=channels, TAPS=taps, STATE_ROWS=triton.next_power_of_2(taps - 1), R=16 if many else 1, C=64,
        MAX_PENDING=triton.next_power_of_2(max(1, ring_size)), PART=size, num_warps=4 if many else 2, **overlapping(),
    )  # fmt: skip
    return out
