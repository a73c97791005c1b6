"""Demand-paged arenas: memory follows use, up and down, and no block loses what it holds."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from motley.kvcache.arena import Arena, GroupBatch, LayerGroup
from motley.kvcache.paging import PAGE, PagedMemory, can_page_on_demand
from motley.kvcache.types import get_cache_type

pytestmark = pytest.mark.skipif(not can_page_on_demand(), reason="this system cannot page on demand")

BLOCK, DIM = 32, 64


def make_arena(n_blocks: int, kind: str = "f32", n_heads: int = 4) -> Arena:
    groups = [LayerGroup((0,), (n_heads,), n_blocks)]
    k_type = get_cache_type(kind)
    return Arena(k_type, k_type, groups, block_size=BLOCK, head_dim=DIM, demand_paged=True)


def write(arena: Arena, blocks: Iterable[int], value: float = 1.0) -> None:
    slots = torch.tensor([block * BLOCK + i for block in blocks for i in range(BLOCK)])
    batch = [GroupBatch(slots, ())]
    arena.begin(batch, [])
    layer = arena.layer(0, batch)
    n_heads = layer.rows.stop - layer.rows.start
    layer.write(*(torch.full((len(slots), n_heads, DIM), value) for _ in range(2)))


def read(arena: Arena, block: int) -> torch.Tensor:
    layer = arena.layer(0, [GroupBatch(torch.tensor([]), ())])
    slots = torch.arange(block * BLOCK, (block + 1) * BLOCK)
    return torch.cat([layer.keys.read(layer.rows, slots), layer.values.read(layer.rows, slots)])


def resident_set() -> int:
    """Of this process, in bytes, as the system counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_an_arena_takes_memory_as_blocks_are_written_and_gives_it_back() -> None:
    arena = make_arena(4096)  # 256 MiB
    block_bytes = arena.n_bytes // 4096
    assert arena.n_resident == 0
    before = resident_set()
    write(arena, range(512))
    full = resident_set()
    assert arena.n_resident == 512 * block_bytes
    assert full - before >= 500 * block_bytes
    arena.give_back([range(128, 512)])
    assert arena.n_resident == 128 * block_bytes
    assert full - resident_set() >= 380 * block_bytes
    arena.give_back([range(128)])
    assert arena.n_resident == 0


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
