"""Demand-paged arenas: memory follows use, up and down, and no block loses what it holds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from motley.kvcache.arena import Arena, GroupBatch, LayerGroup
from motley.kvcache.paging import PagedMemory, can_page_on_demand
from motley.kvcache.types import get_cache_type

pytestmark = pytest.mark.skipif(not can_page_on_demand(), reason="this system cannot page on demand")

BLOCK, DIM = 32, 64


def make_arena(n_blocks: int, kind: str = "f32", n_heads: int = 4) -> Arena:
    groups = [LayerGroup((0,), (n_heads,), n_blocks)]
    k_type = get_cache_type(kind)
    return Arena(k_type, k_type, groups, block_size=BLOCK, head_dim=DIM, demand_paged=True)


def write(arena: Arena, blocks: Iterable[int], value: float = 1.0) -> None:
    slots = torch.tensor([block * BLOCK + i for block in blocks for i in range(BLOCK)])
    batch = GroupBatch(slots, ())
    arena.prepare([batch], [])
    layer = arena.layer(0)
    n_heads = layer.rows.stop - layer.rows.start
    layer.on(batch).write(*(torch.full((len(slots), n_heads, DIM), value) for _ in range(2)))


def read(arena: Arena, block: int) -> torch.Tensor:
    layer = arena.layer(0)
    slots = torch.arange(block * BLOCK, (block + 1) * BLOCK)
    return torch.cat([layer.keys.read(layer.rows, slots), layer.values.read(layer.rows, slots)])


def test_an_arena_takes_memory_as_blocks_are_written_and_gives_it_back() -> None:
    arena = make_arena(4096)
    block_bytes = arena.n_bytes // 4096
    assert arena.n_resident == 0
    write(arena, range(512))
    assert arena.n_resident == 512 * block_bytes
    arena.give_back([range(128, 512)])
    assert arena.n_resident == 128 * block_bytes
    arena.give_back([range(128)])
    assert arena.n_resident == 0


RESIDENT_SET = """
import json, pathlib, mmap
import torch
from motley.kvcache.paging import PagedMemory

def resident_set():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

memory, seen = PagedMemory(), []
plane = memory.allocate((1024, 1 << 20), torch.uint8)
for use in (lambda: None, lambda: plane[:256].fill_(1), lambda: memory.give_back(range(256), set(range(1024)))):
    use()
    seen.append(resident_set())
print(json.dumps(seen))
"""


def test_the_system_sees_the_resident_set_rise_and_fall() -> None:
    """In a process of its own, where nothing else takes or frees memory; the arena is 1 GiB."""
    run = subprocess.run([sys.executable, "-c", RESIDENT_SET], capture_output=True, text=True, check=True)
    before, full, after = json.loads(run.stdout)
    assert 0.9 < (full - before) / 2**28 < 1.1
    assert abs(after - before) < 0.1 * 2**28


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("n_heads", [1, 3])
def test_pages_that_blocks_share_stay_until_the_last_of_them_is_free(kind: str, n_heads: int) -> None:
    """A block's scales are a few hundred bytes: dozens of blocks lie in one page, and blocks straddle pages."""
    arena, rng = make_arena(100, kind, n_heads), random.Random(5)
    held: set[int] = set()
    for step in range(60):
        taken = rng.sample(sorted(set(range(100)) - held), min(100 - len(held), rng.randint(0, 12)))
        if taken:
            write(arena, taken)
            held.update(taken)
        freed = rng.sample(sorted(held), rng.randint(0, len(held)))
        held.difference_update(freed)
        arena.give_back([freed])
        assert all(bool((read(arena, block) > 0.9).all()) for block in held), step
    arena.give_back([held])
    assert arena.n_resident == 0


def test_memory_without_bytes_is_no_trouble() -> None:
    memory = PagedMemory()
    assert memory.allocate((4, 0, 2), torch.float16).shape == (4, 0, 2)
    memory.give_back([0, 1], {0, 1, 2, 3})
    assert memory.n_resident == 0


def test_a_plain_arena_counts_as_resident() -> None:
    f16 = get_cache_type("f16")
    arena = Arena(f16, f16, [LayerGroup((0,), (2,), 8)], block_size=BLOCK, head_dim=DIM)
    assert arena.n_resident == arena.n_bytes == 8 * BLOCK * 2 * DIM * 2 * 2


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2",
    reason="this system reserves all memory",
)
def test_planes_larger_than_memory_are_only_reserved() -> None:
    """A process that holds them can still fork."""
    n_bytes = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    plane = PagedMemory().allocate((1024, n_bytes // 1024), torch.uint8)
    plane[-1, -1] = 7
    child = os.fork()
    if not child:
        os._exit(int(plane[-1, -1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
