"""Demand-paged GPU memory: addresses are reserved, memory is mapped to them when blocks are first used, and unmapped
when all blocks that reach into it are empty.

CUDA calls it virtual memory management. Its calls come from `cuda-bindings`, behind the small interface `Driver`.
Memory comes in granules (2 MiB on today's GPUs); torch sees one tensor over the whole range, as if all were there.
The first granule of each plane always is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import Any, Protocol

import torch

from motley.errors import DeviceError

# It always has memory: torch and Triton ask what kind of memory a tensor is in, and look at its first byte.
_FIRST = 0


class Driver(Protocol):
    """Memory and addresses, apart."""

    granule: int  # bytes: what is mapped begins and ends at multiples of it

    def reserve(self, n_bytes: int) -> int:
        """Addresses without memory; gives the first."""
        ...

    def release(self, address: int, n_bytes: int) -> None:
        """Release addresses; none of them has memory."""
        ...

    def map(self, address: int) -> Any:
        """Map a granule of memory at an address. Returns the argument of `unmap`."""
        ...

    def unmap(self, address: int, handle: Any) -> None: ...

    def tensor(self, address: int, n_bytes: int) -> torch.Tensor:
        """The range as bytes (n_bytes,). Its first granule is mapped at the moment."""
        ...

    def synchronize(self) -> None:
        """Wait until no kernel uses memory that is about to be unmapped."""
        ...


@dataclass
class _Range:
    """One plane: blocks one after the other."""

    address: int
    n_bytes: int  # reserved: whole granules
    block_bytes: int
    n_blocks: int
    data: torch.Tensor  # uint8: the plane's bytes
    handles: dict[int, Any] = field(default_factory=dict)  # by number of the granule: those with memory


class GpuPagedMemory:
    """Planes whose first axis is blocks; like paging.PagedMemory, but its user says when blocks are first used."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._ranges: list[_Range] = []
        weakref.finalize(self, _release, driver, self._ranges)

    @property
    def n_resident(self) -> int:
        """Bytes of all planes that have memory at this moment."""
        return sum(len(own.handles) for own in self._ranges) * self._driver.granule

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A plane (blocks, …), of which only the first granule has memory."""
        driver, n_bytes = self._driver, prod(shape) * dtype.itemsize
        reserved = -(-max(n_bytes, 1) // driver.granule) * driver.granule
        address = driver.reserve(reserved)
        first = driver.map(address)
        data = driver.tensor(address, n_bytes)
        data[: driver.granule].zero_()
        self._ranges.append(
            _Range(address, reserved, n_bytes // max(1, shape[0]), shape[0], data, {_FIRST: first})
        )
        return data.view(dtype).view(shape)

    def take(self, blocks: Iterable[int]) -> None:
        """These blocks are about to be used: zeros, where they have had no memory."""
        granule = self._driver.granule
        for own in self._ranges:
            for block in blocks:
                start, stop = block * own.block_bytes, (block + 1) * own.block_bytes
                for number in range(start // granule, -(-stop // granule)):
                    if number not in own.handles:
                        own.handles[number] = self._driver.map(own.address + number * granule)
                        own.data[number * granule : (number + 1) * granule].zero_()

    def give_back(self, blocks: Iterable[int], empty: set[int]) -> None:
        """Return the memory of `blocks`, all of which are in `empty`: the blocks that hold nothing."""
        granule, is_idle = self._driver.granule, False
        for own in self._ranges:
            size = max(1, own.block_bytes)
            touched = {
                number
                for block in blocks
                for number in range(block * size // granule, -(-(block + 1) * size // granule))
            }
            for number in (touched & own.handles.keys()) - {_FIRST}:
                first, stop = number * granule // size, -(-(number + 1) * granule // size)
                if empty.issuperset(range(first, min(stop, own.n_blocks))):
                    if not is_idle:
                        self._driver.synchronize()
                        is_idle = True
                    self._driver.unmap(own.address + number * granule, own.handles.pop(number))


def _release(driver: Driver, ranges: list[_Range]) -> None:
    driver.synchronize()
    for own in ranges:
        for number, handle in own.handles.items():
            driver.unmap(own.address + number * driver.granule, handle)
        driver.release(own.address, own.n_bytes)
    ranges.clear()


def can_page_gpus() -> bool:
    """Whether the driver's calls are at hand."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


class CudaDriver:
    """The driver's own calls, on one GPU."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._calls = driver
        self._device = device
        torch.zeros(1, device=device)  # the calls need torch's context
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device.index or 0
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = location
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granule = int(self._call(driver.cuMemGetAllocationGranularity, self._kind, smallest))

    def reserve(self, n_bytes: int) -> int:
        return int(self._call(self._calls.cuMemAddressReserve, n_bytes, 0, 0, 0))

    def release(self, address: int, n_bytes: int) -> None:
        self._call(self._calls.cuMemAddressFree, address, n_bytes)

    def map(self, address: int) -> Any:
        with ExitStack() as undo:  # what fails midway leaves nothing behind
            handle = self._create()
            undo.callback(self._call, self._calls.cuMemRelease, handle)
            self._call(self._calls.cuMemMap, address, self.granule, 0, handle, 0)
            undo.callback(self._call, self._calls.cuMemUnmap, address, self.granule)
            self._call(self._calls.cuMemSetAccess, address, self.granule, [self._access], 1)
            undo.pop_all()
        return handle

    def unmap(self, address: int, handle: Any) -> None:
        self._call(self._calls.cuMemUnmap, address, self.granule)
        self._call(self._calls.cuMemRelease, handle)

    def tensor(self, address: int, n_bytes: int) -> torch.Tensor:
        if not n_bytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(_Bytes(address, n_bytes), device=self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _create(self) -> Any:
        """A granule of memory; what torch keeps for later is let go for it."""
        try:
            return self._call(self._calls.cuMemCreate, self.granule, self._kind, 0)
        except DeviceError:
            torch.cuda.empty_cache()
            return self._call(self._calls.cuMemCreate, self.granule, self._kind, 0)

    def _call(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
        error, *results = function(*arguments)
        if int(error) != 0:
            raise DeviceError(
                f"{self._device}: {function.__name__} failed: {error.name}",
                hint="lower the cache's limit, or free memory on the GPU",
            )
        return results[0] if results else None


@cache
def cuda_driver(device: torch.device) -> CudaDriver:
    return CudaDriver(device)


class _Bytes:
    """A range of device memory as torch takes it over."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (n_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }
