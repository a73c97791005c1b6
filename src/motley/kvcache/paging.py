"""Demand-paged host memory: addresses are reserved, pages are taken when first written and given back when freed."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from math import prod

import torch

PAGE = mmap.PAGESIZE


def can_page_on_demand() -> bool:
    """Whether this system can reserve addresses without memory, and give pages back."""
    return sys.platform == "linux" and hasattr(mmap.mmap, "madvise") and hasattr(mmap, "MADV_DONTNEED")


class PagedMemory:
    """Planes whose first axis is blocks. A page is given back when every block that reaches into it is empty."""

    def __init__(self) -> None:
        self._regions: list[tuple[mmap.mmap, int, int]] = []  # (memory, bytes per block, blocks)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed plane (blocks, …) that takes no memory yet."""
        n_bytes = prod(shape) * dtype.itemsize
        if not n_bytes:
            return torch.zeros(shape, dtype=dtype)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, n_bytes, flags=flags)
        self._regions.append((memory, n_bytes // shape[0], shape[0]))
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def give_back(self, blocks: Iterable[int], empty: set[int]) -> None:
        """Return the pages of `blocks`, all of which are in `empty`: the blocks that hold nothing."""
        blocks = list(blocks)
        for memory, block_bytes, n_blocks in self._regions:
            for page in {
                p for block in blocks for p in _pages(block * block_bytes, (block + 1) * block_bytes)
            }:
                first, stop = page * PAGE // block_bytes, -(-(page + 1) * PAGE // block_bytes)
                if all(block in empty for block in range(first, min(stop, n_blocks))):
                    memory.madvise(mmap.MADV_DONTNEED, page * PAGE, min(PAGE, len(memory) - page * PAGE))


def _pages(start: int, stop: int) -> range:
    """The pages that bytes start … stop - 1 reach into."""
    return range(start // PAGE, -(-stop // PAGE))
