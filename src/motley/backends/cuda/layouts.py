"""Layouts of decode batches: what a captured graph depends on besides the numbers of rows. Imports no torch."""

from __future__ import annotations

BUNDLE_ROWS = (1, 4, 8, 16, 64)  # of the largest bundle of a batch, rounded up

Layout = tuple[int, int]  # the number of bundles, and the most rows of one


def decode_layout(n_rows: int, n_bundles: int, most_rows: int) -> Layout:
    """The layout of a decode batch. `n_rows`: of its plan. `most_rows`: of its largest bundle."""
    rounded = next(n for n in BUNDLE_ROWS if n >= most_rows)
    return (n_rows if rounded == 1 else min(_power_of_two(n_bundles), n_rows)), rounded


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
