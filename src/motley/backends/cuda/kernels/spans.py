"""The description of one sequence of a batch that a kernel of recurrent layers reads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_span(spans, i):
    """The nine numbers of sequence i, as in `StateSpan` (csrc/kernels.hpp); slots, rings and rows have 64 bits."""
    span = spans + i * 9
    first_row, n_rows, position = tl.load(span).to(tl.int64), tl.load(span + 1), tl.load(span + 2)
    source, n_read, source_ring = (
        tl.load(span + 3).to(tl.int64),
        tl.load(span + 4),
        tl.load(span + 5).to(tl.int64),
    )
    target, n_written, target_ring = (
        tl.load(span + 6).to(tl.int64),
        tl.load(span + 7),
        tl.load(span + 8).to(tl.int64),
    )
    return first_row, n_rows, position, source, n_read, source_ring, target, n_written, target_ring
