"""Demand-paged GPU memory, on a driver that only counts: what is used has memory, what is not has none."""

from __future__ import annotations

from contextlib import nullcontext
from enum import IntEnum
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.errors import DeviceError
from motley.kvcache import arena as arena_module
from motley.kvcache.arena import Arena, GroupBatch, LayerGroup
from motley.kvcache.gpu_paging import CudaDriver, GpuPagedMemory
from motley.kvcache.types import get_cache_type

GRANULE = 64


class FakeDriver:
    """Host memory that is full of sevens, and a list of what is mapped; it knows no more than `limit` granules."""

    granule = GRANULE

    def __init__(self, limit: int = 10**6) -> None:
        self.mapped: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.limit = limit
        self.is_idle = True
        self._next = GRANULE
        self._n_mapped = 0

    def reserve(self, n_bytes: int) -> int:
        address, self._next = self._next, self._next + n_bytes
        self.reserved[address] = n_bytes
        return address

    def release(self, address: int, n_bytes: int) -> None:
        assert self.reserved.pop(address) == n_bytes
        assert not any(address <= at < address + n_bytes for at in self.mapped)

    def map(self, address: int) -> Any:
        assert address % GRANULE == 0
        assert address not in self.mapped
        if len(self.mapped) >= self.limit:
            raise DeviceError("no memory")
        self._n_mapped += 1
        self.mapped[address] = self._n_mapped
        return self._n_mapped

    def unmap(self, address: int, handle: Any) -> None:
        assert self.is_idle
        assert self.mapped.pop(address) == handle

    def tensor(self, address: int, n_bytes: int) -> torch.Tensor:
        assert address in self.mapped
        return torch.full((n_bytes,), 7, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.is_idle = True


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 9), min_size=1)), max_size=12),
)
def test_blocks_in_use_have_memory_and_the_rest_has_none(
    block_bytes: int, moves: list[tuple[bool, set[int]]]
) -> None:
    driver = FakeDriver()
    memory = GpuPagedMemory(driver)
    plane = memory.allocate((10, block_bytes), torch.uint8)
    (base,) = driver.reserved
    used: set[int] = set()
    for takes, blocks in moves:
        if takes:
            fresh = blocks - used
            memory.take(fresh)
            plane[sorted(fresh)] = 1
            used |= blocks
        else:
            used -= blocks
            driver.is_idle = False
            memory.give_back(blocks, set(range(10)) - used)
        wanted = {
            base + at // GRANULE * GRANULE
            for b in used
            for at in range(b * block_bytes, (b + 1) * block_bytes)
        } | {base}
        assert set(driver.mapped) == wanted
        assert memory.n_resident == len(wanted) * GRANULE
        assert bool((plane[sorted(used)] == 1).all())


def test_memory_is_zero_when_it_comes() -> None:
    memory = GpuPagedMemory(FakeDriver())
    plane = memory.allocate((4, 100), torch.uint8)
    memory.take([1])
    assert not plane[1].any()


def test_forgotten_memory_is_released() -> None:
    driver = FakeDriver()
    memory = GpuPagedMemory(driver)
    memory.allocate((4, 100), torch.uint8)
    memory.take([0, 3])
    del memory
    assert not driver.mapped
    assert not driver.reserved


class Result(IntEnum):
    SUCCESS = 0
    FULL = 2


class FakeCalls:
    """The driver's calls; the one called `broken` fails."""

    def __init__(self, broken: str) -> None:
        self.held: set[str] = set()
        for name, holds in (("cuMemCreate", "memory"), ("cuMemMap", "mapping"), ("cuMemSetAccess", "")):
            setattr(self, name, self._call(name, Result.FULL if name == broken else Result.SUCCESS, holds))
        for name, holds in (("cuMemRelease", "memory"), ("cuMemUnmap", "mapping")):
            setattr(self, name, self._call(name, Result.SUCCESS, holds, gives_back=True))

    def _call(self, name: str, result: Result, holds: str, *, gives_back: bool = False) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if result == Result.SUCCESS and holds:
                (self.held.remove if gives_back else self.held.add)(holds)
            return result, "handle"

        call.__name__ = name
        return call


@pytest.mark.parametrize("broken", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", ""])
def test_memory_that_cannot_be_mapped_leaves_nothing_behind(broken: str) -> None:
    driver, calls = object.__new__(CudaDriver), FakeCalls(broken)
    vars(driver).update(_calls=calls, _device="cuda:0", _kind=None, _access=None, granule=GRANULE)
    with pytest.raises(DeviceError, match=broken) if broken else nullcontext():
        driver.map(GRANULE)
    assert calls.held == (set() if broken else {"memory", "mapping"})


def test_an_arena_without_memory_for_a_block_can_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, f32 = FakeDriver(limit=2 * 8 * 1024 // GRANULE), get_cache_type("f32")
    monkeypatch.setattr(arena_module, "_paged_memory", lambda device: GpuPagedMemory(driver))
    groups = [LayerGroup((0,), (1,), 4)]
    arena = Arena(f32, f32, groups, block_size=32, head_dim=64, demand_paged=True)

    def use(block: int) -> None:
        arena.prepare([GroupBatch(torch.tensor([block * 32]), ())], [])

    use(0)
    with pytest.raises(DeviceError, match="no memory"):
        use(1)
    driver.limit += 2
    arena.give_back([[0, 1]])
    assert arena.n_resident == 2 * GRANULE
    use(1)
    use(1)
    assert arena.n_resident == 2 * 8 * 1024 + 2 * GRANULE
