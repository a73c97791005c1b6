"""Launches with a pipeline as deep as shared memory lets it be: a program has 227 KiB on an H200, 99 on an RTX 4090."""

from __future__ import annotations

from collections.abc import Callable

from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from motley.backends.cuda.kernels.bits import INTERPRETED

_LARGE = (90, 100, 103)  # capabilities with 227 KiB of shared memory


def has_large_memory() -> bool:
    """Whether the GPU is one of those with much shared memory."""
    return not INTERPRETED and driver.active.get_current_target().arch in _LARGE


def launch(kernel: Callable[..., object], *args: object, num_stages: int, **options: object) -> None:
    """`kernel`, with its grid, in `num_stages` stages, or in fewer where these do not fit."""
    for n in range(num_stages, 1, -1):
        try:
            kernel(*args, num_stages=n, **options)
            return
        except OutOfResources:  # before anything is launched; Triton remembers it
            continue
    kernel(*args, num_stages=1, **options)
