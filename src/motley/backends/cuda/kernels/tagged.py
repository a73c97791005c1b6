"""Messages between a GPU and a native program of the CPU, through pinned memory: no thread of the host takes part.

A word of 8 bytes is a value and the number of its run, its tag: word = tag · 2³² + value. A reader waits until all
words have the tag of this run. So nothing depends on the order in which words arrive. The other side: csrc/tagged.hpp.

    advance   tag += 1: once a run
    post      words[i] = (tag, x[i])
    fetch     waits for the tags, then out[i] = words[i], or own[i] + words[i]

A program that waits ends early when `aborted` is not 0; what it stores then means nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait

_AT_ONCE = 2048  # values of a program


@triton.jit
def _advance(tag):
    wait()
    tl.store(tag, tl.load(tag) + 1)


@triton.jit(do_not_specialize=["n"])
def _post(x, words, tag, n, AT_ONCE: tl.constexpr):
    wait()
    let_next_start()
    i = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    ok = i < n
    value = tl.load(x + i, ok, other=0).to(tl.int64) & 0xFFFFFFFF
    tl.store(words + i, (tl.load(tag).to(tl.int64) << 32) | value, ok)


@triton.jit(do_not_specialize=["n"])
def _fetch(words, own, out, tag, aborted, n, HAS_OWN: tl.constexpr, AT_ONCE: tl.constexpr):
    wait()
    i = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    ok = i < n
    expected = tl.load(tag)
    found = tl.load(words + i, ok, other=0, volatile=True)
    stop = tl.load(aborted, volatile=True)
    n_missing = tl.sum((ok & ((found >> 32).to(tl.int32) != expected)).to(tl.int32))
    while (n_missing > 0) & (stop == 0):
        found = tl.load(words + i, ok, other=0, volatile=True)
        stop = tl.load(aborted, volatile=True)
        n_missing = tl.sum((ok & ((found >> 32).to(tl.int32) != expected)).to(tl.int32))
    let_next_start()
    value = found.to(tl.int32)
    if HAS_OWN:
        total = value.to(tl.float32, bitcast=True) + tl.load(own + i, ok, other=0).to(
            tl.float32, bitcast=True
        )
        value = total.to(tl.int32, bitcast=True)
    tl.store(out + i, value, ok)


def advance(tag: torch.Tensor) -> None:
    """Begin a run: tag (1,) int32, on the device."""
    _advance[(1,)](tag, num_warps=1, **overlapping())


def post(x: torch.Tensor, words: torch.Tensor, tag: torch.Tensor) -> None:
    """x (values of 4 bytes) → words (int64, pinned)."""
    assert x.is_contiguous()
    assert words.numel() == x.numel()
    grid = (triton.cdiv(x.numel(), _AT_ONCE),)
    _post[grid](_bits(x), words, tag, x.numel(), AT_ONCE=_AT_ONCE, num_warps=8, **overlapping())


def fetch(
    words: torch.Tensor,
    out: torch.Tensor,
    tag: torch.Tensor,
    aborted: torch.Tensor,
    own: torch.Tensor | None = None,
) -> None:
    """words (int64, pinned) → out (values of 4 bytes); with `own`, floats, their sum. `aborted`: (1,) int32, pinned."""
    assert out.is_contiguous()
    assert words.numel() == out.numel()
    assert own is None or (own.is_contiguous() and own.numel() == out.numel())
    grid = (triton.cdiv(out.numel(), _AT_ONCE),)
    _fetch[grid](
        words, _bits(out if own is None else own), _bits(out), tag, aborted, out.numel(),
        HAS_OWN=own is not None, AT_ONCE=_AT_ONCE, num_warps=8, **overlapping(),
    )  # fmt: skip


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.int32 else x.view(torch.int32)
