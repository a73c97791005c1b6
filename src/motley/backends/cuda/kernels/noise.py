"""Gumbel noise of tokens on the GPU: the same random words as `motley.engine.noise`, which is the specification.

Philox4x32-10 with key = the seed's two words and counter = (id // 4, index, 0, 0); a token takes word id % 4. The
noise is -log(-log(1 - u)) in float32, with u = (word + 1/2) / 2³² kept exact to 24 bits at both ends.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, k0, k1):
    """Four random words (uint32) for each counter (c0, c1, 0, 0)."""
    c2, c3 = c0 * 0, c0 * 0
    c1 += c0 * 0
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high2, low2 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel_of(word):
    """The Gumbel variate of random words (uint32)."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2⁻³²
    rest = (
        (word ^ 0xFFFFFFFF).to(tl.float32) + 0.5
    ) * 2.3283064365386963e-10  # 1 - u, exact where it is small
    # -log(1 - u): by its series for small u, where 1 - u would lose bits of u.
    series = u * (1.0 + u * (0.5 + u * (0.33333333 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(rest)))


@triton.jit
def noise_of(ids, k0, k1, index):
    """The noise of some token ids (int32, any shape): one counter for each."""
    w0, w1, w2, w3 = philox((ids >> 2).to(tl.uint32), index, k0, k1)
    word = ids & 3
    return gumbel_of(tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3))))


@triton.jit
def noise_of_run(first, k0, k1, index, N: tl.constexpr):
    """The noise of the N token ids from `first` on, a multiple of 4: one counter for four."""
    w0, w1, w2, w3 = philox((first // 4 + tl.arange(0, N // 4)).to(tl.uint32), index, k0, k1)
    both = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (N / 4, 2, 2): in memory's order words 0, 1, 2, 3
    return gumbel_of(tl.reshape(both, [N]))
