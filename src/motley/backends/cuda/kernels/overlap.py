"""Kernels that start while the one before them still runs (programmatic dependent launch, from capability 9.0 on).

A kernel that is launched with `overlapping()` may start as soon as every program of the one before it has called
`let_next_start`. It may read what no kernel writes, such as weights, at once, and anything else after `wait`, which
returns when the one before has ended and its results can be read. As every kernel waits, so have all before it. So a
product loads its first weights while the norm before it is computed.

Elsewhere, in the interpreter and in kernels launched without it, both do nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401  the interpreter wants it in every module with a kernel
from triton.language import target_info
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from motley.backends.cuda.kernels.bits import INTERPRETED


@triton.constexpr_function
def _is_possible():
    """Not a constant of this module: Triton would give the first kernel that is compiled with it another key."""
    return not INTERPRETED and target_info.cuda_capability_geq(9, 0)


@triton.jit
def let_next_start():
    if _is_possible():
        gdc_launch_dependents()


@triton.jit
def wait():
    if _is_possible():
        gdc_wait()


def overlapping() -> dict[str, bool]:
    """Launch options of a kernel that calls `wait` before it reads or writes anything but weights."""
    if INTERPRETED or driver.active.get_current_target().arch < 90:
        return {}
    return {"launch_pdl": True}
