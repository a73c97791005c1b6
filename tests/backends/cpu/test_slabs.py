"""Weights share slabs of memory on huge pages."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import pytest
import torch

from motley.backends.cpu import slabs
from motley.backends.cpu.slabs import HUGE_PAGE, Slabs


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    memory, sizes = Slabs(), (1, 0, 63, 64, 65, 70 << 20, 3, HUGE_PAGE, 60 << 20, 7 << 20)
    taken = [memory.take(n) for n in sizes]
    assert [len(each) for each in taken] == list(sizes)
    assert all(each.dtype == torch.uint8 and each.data_ptr() % 64 == 0 for each in taken if len(each))
    spans = sorted((each.data_ptr(), each.data_ptr() + len(each)) for each in taken if len(each))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for number, each in enumerate(taken):  # both ends can be written
        each[:1], each[-1:] = number, number
    assert all(bool((each[:1] == number).all()) for number, each in enumerate(taken))


def test_small_tensors_share_a_slab_which_lives_as_long_as_the_last_one() -> None:
    memory = Slabs()
    a, b = memory.take(1000), memory.take(1000)
    assert b.data_ptr() - a.data_ptr() == 1024
    b.fill_(7)
    del a, memory
    assert b.sum() == 7000


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")
def test_all_of_a_tensor_may_be_on_huge_pages() -> None:
    taken = Slabs().take(5 << 20)
    assert taken.data_ptr() % HUGE_PAGE == 0
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this kernel has no transparent huge pages")
    taken.fill_(1)
    assert "hg" in _flags_of(taken.data_ptr())
    assert "hg" in _flags_of(taken.data_ptr() + len(taken) - 1)


def _flags_of(place: int) -> list[str]:
    """The flags of the mapping that has this address."""
    is_within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            start, stop = (int(part, 16) for part in name.split("-"))
            is_within = start <= place < stop
        elif is_within and name == "VmFlags:":
            return rest
    raise AssertionError("no such mapping")


def test_without_huge_pages_memory_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_new_slab", lambda n_bytes: None)
    memory = Slabs()
    a, b = memory.take(100), memory.take(0)
    a.fill_(3)
    assert a.sum() == 300
    assert len(b) == 0
