"""What each device needs before anything is loaded, and whether its budget, its GPU's free memory, or the machine's
memory allows it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from motley.backends.cuda.footprint import free_bytes, stored_bytes, workspace_bytes
from motley.errors import CacheError, DeviceError
from motley.models import BatchShape
from motley.plan import lay_out
from motley.runtime.caching import CachePlan
from motley.runtime.crew import Crew
from motley.runtime.loading import weight_bytes
from motley.runtime.splitting import ModelSplit
from motley.units import show_bytes

_MOST_BLOCKS = 2**26
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_HINT = "give it a smaller share (-ts), raise --device-memory, or add a device"


@dataclass(frozen=True)
class Needs:
    """Bytes that a device needs, apart from the KV cache."""

    weights: int
    activations: int
    workspace: int = 0  # of a GPU's kernels and libraries

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.workspace

    def __str__(self) -> str:
        parts = [f"{show_bytes(self.weights)} for weights", f"{show_bytes(self.activations)} for activations"]
        if self.workspace:
            parts.append(f"{show_bytes(self.workspace)} for its kernels' workspace")
        return f"{', '.join(parts[:-1])} and {parts[-1]}"


def device_needs(split: ModelSplit, largest: BatchShape) -> list[Needs]:
    """Of each device, for batches up to `largest`. Loads nothing."""
    return [_needs(split, device, largest) for device in range(len(split.crew))]


def _needs(split: ModelSplit, device: int, largest: BatchShape) -> Needs:
    share = split.share(device, largest)
    n_bytes = lay_out(share.graph).n_bytes
    if not split.crew.devices[device].is_gpu:
        return Needs(weight_bytes(share), n_bytes)
    weights = sum(stored_bytes(node) for node in share.graph.weights)
    # Twice: products read activations in forms of their own, which lie beside them for a while.
    return Needs(weights, 2 * n_bytes, workspace_bytes(share.graph))


def room_for_cache(split: ModelSplit, needs: Sequence[Needs]) -> list[int | None]:
    """What is left for the KV cache on each device (None: no limit); DeviceError, with numbers, where nothing is."""
    room: list[int | None] = []
    for index, (device, need) in enumerate(zip(split.crew.devices, needs, strict=True)):
        if device.memory is not None and device.memory < need.total:
            raise DeviceError(
                f"device {split.crew.label(index)} needs {need}, but may use {show_bytes(device.memory)}: "
                f"{show_bytes(need.total - device.memory)} are missing",
                hint=_HINT,
            )
        room.append(None if device.memory is None else device.memory - need.total)
    for name in dict.fromkeys(device.name for device in split.crew.devices if device.is_gpu):
        for index, n_bytes in _shared_room(split, needs, name).items():
            own = room[index]
            room[index] = n_bytes if own is None else min(own, n_bytes)
    return room


def _shared_room(split: ModelSplit, needs: Sequence[Needs], gpu: str) -> dict[int, int]:
    """What a GPU's free memory leaves for the caches of the devices that lie on it, by their shares."""
    members = [index for index, device in enumerate(split.crew.devices) if device.name == gpu]
    free, total = free_bytes(gpu), sum(needs[index].total for index in members)
    if total > free:
        wants = "; ".join(f"{split.crew.label(index)} needs {needs[index]}" for index in members)
        raise DeviceError(
            f"{gpu} has {show_bytes(free)} free: {show_bytes(total - free)} are missing. {wants}",
            hint=f"free memory on the GPU, lower the batch size (n_batch) or -c, or: {_HINT}",
        )
    shares = [split.crew.shares[index] for index in members]
    whole = sum(shares) or Fraction(1)
    return {index: int((free - total) * share / whole) for index, share in zip(members, shares, strict=True)}


def require_host_memory(crew: Crew, plan: CachePlan) -> None:
    """CacheError if the cache, which may be planned for another machine, is larger than this one.

    Linux would give out the addresses, and end the process when they are used. Demand-paged, it may reserve more than
    it will ever hold; but there are lists of its blocks.
    """
    n_bytes = sum(plan.n_bytes(index) for index, device in enumerate(crew.devices) if not device.is_gpu)
    memory = host_bytes()
    if memory is not None and n_bytes > memory and not plan.config.demand_paged:
        raise CacheError(
            f"the KV cache would take {show_bytes(n_bytes)}, but this machine has {show_bytes(memory)}",
            hint="lower the context (-c) or the parallel requests, choose a smaller cache type (-ctk, -ctv), or set a "
            "limit: --kv-cache-bytes",
        )
    n_blocks = sum(group.n_blocks for group in plan.groups)
    if n_blocks > _MOST_BLOCKS:
        raise CacheError(
            f"the KV cache would have {n_blocks:,} blocks of {plan.config.block_size} tokens",
            hint="lower --kv-cache-bytes, --kv-cache-tokens or the number of parallel requests",
        )


def host_bytes() -> int | None:
    """Memory of this machine, or of the container that this is; None where it does not say."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    try:
        return min(memory, int(_CONTAINER_LIMIT.read_text()))
    except (ValueError, OSError):  # "max", or no such file
        return memory
