"""The orthonormal Walsh–Hadamard transform of rows, in registers. Reference: a product with graph.ops.Hadamard."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard(x, R: tl.constexpr, N: tl.constexpr, LOG_N: tl.constexpr):
    """x (R, N) float32, N = 2 ** LOG_N → x · H.

    Each step adds and subtracts neighbours and moves their bit of the index to its top; after all of them the bits are
    back in their places.
    """
    for _ in tl.static_range(LOG_N):
        a, b = tl.split(tl.reshape(x, [R, N // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [R, N])
    return x * (2.0 ** (-0.5 * LOG_N))


@triton.jit
def rotated(x, D: tl.constexpr, ROTATION: tl.constexpr, LOG_ROTATION: tl.constexpr):
    """x (D,), each run of ROTATION = 2 ** LOG_ROTATION values rotated by H."""
    return tl.reshape(
        hadamard(tl.reshape(x, [D // ROTATION, ROTATION]), D // ROTATION, ROTATION, LOG_ROTATION), [D]
    )
