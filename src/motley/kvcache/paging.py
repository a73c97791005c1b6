"""Demand-paged host memory: addresses are reserved, pages are taken when first written and given back when freed."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from motley.kvcache.gpu_paging import can_page_gpus

PAGE = mmap.PAGESIZE
_CPU = torch.device("cpu")
_PAGES_A_LOOK = 1 << 16  # of which `mincore` is asked at once


def can_page_on_demand(device: torch.device = _CPU) -> bool:
    """Whether addresses of a device can be reserved without memory, and memory be given back."""
    if device.type == "cuda":
        return can_page_gpus()
    return sys.platform == "linux" and hasattr(mmap.mmap, "madvise") and hasattr(mmap, "MADV_DONTNEED")


@dataclass(frozen=True)
class _Region:
    """One plane: blocks one after the other."""

    memory: mmap.mmap
    address: int
    block_bytes: int
    n_blocks: int

    def give_back(self, first: int, stop: int, empty: set[int]) -> None:
        """Return the pages of the blocks first … stop - 1 that no other block needs. These are in `empty` already."""
        size = self.block_bytes
        low, high = first * size // PAGE, -(-stop * size // PAGE)  # pages
        if any(block not in empty for block in range(low * PAGE // size, first)):
            low += 1
        if any(block not in empty for block in range(stop, min(-(-high * PAGE // size), self.n_blocks))):
            high -= 1
        if low < high:
            n_bytes = min(high * PAGE, len(self.memory)) - low * PAGE
            self.memory.madvise(mmap.MADV_DONTNEED, low * PAGE, n_bytes)

    def n_resident(self) -> int:
        """Bytes in memory at this moment."""
        libc, n_pages = ctypes.CDLL(None, use_errno=True), 0
        for start in range(0, len(self.memory), _PAGES_A_LOOK * PAGE):
            n_bytes = min(_PAGES_A_LOOK * PAGE, len(self.memory) - start)
            look = (ctypes.c_ubyte * -(-n_bytes // PAGE))()
            address = ctypes.c_void_p(self.address + start)
            if libc.mincore(address, ctypes.c_size_t(n_bytes), look):
                raise OSError(ctypes.get_errno(), "mincore failed")
            n_pages += sum(page & 1 for page in look)
        return n_pages * PAGE


class PagedMemory:
    """Planes whose first axis is blocks. A page is given back when every block that reaches into it is empty."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []

    @property
    def n_resident(self) -> int:
        """Bytes of all planes that are in memory at this moment."""
        return sum(region.n_resident() for region in self._regions)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed plane (blocks, …) that takes no memory yet."""
        n_bytes = prod(shape) * dtype.itemsize
        if not n_bytes:
            return torch.zeros(shape, dtype=dtype)
        # Otherwise the kernel counts all of it as used: a process with such planes could not fork, for example.
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it since 3.13
        memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # one written token must not take 2 MiB
        plane = torch.frombuffer(memory, dtype=dtype).view(shape)
        self._regions.append(_Region(memory, plane.data_ptr(), n_bytes // shape[0], shape[0]))
        return plane

    def take(self, blocks: Iterable[int]) -> None:
        """These blocks are about to be used; the system itself notices when they are."""

    def give_back(self, blocks: Iterable[int], empty: set[int]) -> None:
        """Return the pages of `blocks`, all of which are in `empty`: the blocks that hold nothing."""
        runs = list(_runs(sorted(blocks)))
        for region in self._regions:
            for first, stop in runs:
                region.give_back(first, stop, empty)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs (first, stop) without gaps: one call to the system for each."""
    first = stop = None
    for number in numbers:
        if number != stop:
            if first is not None and stop is not None:
                yield first, stop
            first = number
        stop = number + 1
    if first is not None and stop is not None:
        yield first, stop
