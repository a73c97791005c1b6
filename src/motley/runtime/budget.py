"""Computes the memory that each device needs, before anything is loaded, and checks it against the device's budget,
the GPU's free memory and the machine's memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from motley.backends import Backend, Footprint
from motley.errors import CacheError, DeviceError
from motley.models import BatchShape
from motley.runtime.caching import CachePlan
from motley.runtime.crew import Crew
from motley.runtime.loading import weight_bytes
from motley.runtime.splitting import ModelSplit
from motley.units import show_bytes

_MAX_BLOCKS = 2**26
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_HINT = "give it a smaller share (-ts), raise --device-memory, or add a device"


def device_needs(split: ModelSplit, backends: Sequence[Backend], largest: BatchShape) -> list[Footprint]:
    """The memory that each device needs for batches up to `largest`. Loads nothing."""
    shares = [split.share(device, largest, lends=False) for device in range(len(split.crew))]
    needs = [
        backend.footprint(share.graph, weight_bytes(share))
        for backend, share in zip(backends, shares, strict=True)
    ]
    borrower = split.crew.borrower
    if borrower is not None and split.is_lent(largest):
        own, with_lent = shares[borrower], split.share(borrower, largest)
        graph, n_packed = with_lent.graph, weight_bytes(with_lent)
        need, lent = needs[borrower], backends[borrower].footprint(graph, n_packed)
        resident = {weight.name for weight in own.graph.weights}
        n_streamed = backends[borrower].borrowed_bytes(graph, resident, split.crew.n_lent_ahead)
        needs[borrower] = Footprint(
            need.weights,
            max(need.activations, lent.activations),
            max(need.workspace, lent.workspace) + n_streamed,
        )
    return needs


def room_for_cache(
    split: ModelSplit, backends: Sequence[Backend], needs: Sequence[Footprint]
) -> list[int | None]:
    """Bytes left for the KV cache on each device (None: no limit). DeviceError, with numbers, if none are left."""
    room: list[int | None] = []
    for index, (device, need) in enumerate(zip(split.crew.devices, needs, strict=True)):
        if device.memory is not None and device.memory < need.total:
            raise DeviceError(
                f"device {split.crew.label(index)} needs {need}, but may use {show_bytes(device.memory)}: "
                f"{show_bytes(need.total - device.memory)} are missing",
                hint=_HINT,
            )
        room.append(None if device.memory is None else device.memory - need.total)
    for name, backend in {
        device.full_name: b for device, b in zip(split.crew.devices, backends, strict=True)
    }.items():
        free = backend.free_bytes()
        for index, n_bytes in _shared_room(split, needs, name, free).items():
            own = room[index]
            room[index] = n_bytes if own is None else min(own, n_bytes)
    return room


def _shared_room(
    split: ModelSplit, needs: Sequence[Footprint], name: str, free: int | None
) -> dict[int, int]:
    """By device: its share of what the `free` bytes of its hardware leave for the caches of all devices on it."""
    if free is None:
        return {}
    members = [index for index, device in enumerate(split.crew.devices) if device.full_name == name]
    total = sum(needs[index].total for index in members)
    if total > free:
        wants = "; ".join(f"{split.crew.label(index)} needs {needs[index]}" for index in members)
        raise DeviceError(
            f"{name} has {show_bytes(free)} free: {show_bytes(total - free)} are missing. {wants}",
            hint=f"free memory on the GPU, lower the batch size (n_batch) or -c, or: {_HINT}",
        )
    shares = [split.crew.shares[index] for index in members]
    whole = sum(shares) or Fraction(1)
    return {index: int((free - total) * share / whole) for index, share in zip(members, shares, strict=True)}


def require_host_memory(crew: Crew, plan: CachePlan) -> None:
    """Raises CacheError if the cache, which may be planned for another machine, is larger than this machine's memory.

    Linux would grant the allocation and kill the process when the pages are used. A demand-paged cache may reserve more
    addresses than there is memory, but the lists of its blocks have to fit.
    """
    n_bytes = sum(
        plan.n_bytes(index)
        for index, device in enumerate(crew.devices)
        if not device.is_gpu and device.host is None
    )
    memory = host_bytes()
    if memory is not None and n_bytes > memory and not plan.config.demand_paged:
        raise CacheError(
            f"the KV cache would take {show_bytes(n_bytes)}, but this machine has {show_bytes(memory)}",
            hint="lower the context (-c) or the parallel requests, choose a smaller cache type (-ctk, -ctv), or set a "
            "limit: --kv-cache-bytes",
        )
    n_blocks = sum(group.n_blocks for group in plan.groups)
    if n_blocks > _MAX_BLOCKS:
        raise CacheError(
            f"the KV cache would have {n_blocks:,} blocks of {plan.config.block_size} tokens",
            hint="lower --kv-cache-bytes, --kv-cache-tokens or the number of parallel requests",
        )


def host_bytes() -> int | None:
    """Bytes of memory of this machine, or of the container that this process runs in; None if unknown."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    try:
        return min(memory, int(_CONTAINER_LIMIT.read_text()))
    except (ValueError, OSError):  # "max", or no such file
        return memory
