"""The devices of this machine, as shown to users: names, memory, cores, instruction sets."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from motley.backends import is_available
from motley.runtime.budget import host_bytes
from motley.runtime.crew import known_devices

_CPU_INFO, _MEMORY_INFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
# The instruction sets that kernels are compiled for, the best first, each with the CPU flag that Linux shows for it.
_SETS = (("AVX-512-VNNI", "avx512_vnni"), ("AVX-512", "avx512f"), ("AVX2", "avx2"))


@dataclass(frozen=True)
class DeviceInfo:
    """One device."""

    device: str  # the name for --device
    name: str
    free: int | None  # bytes; None: unknown
    total: int | None
    cores: int  # of a GPU: multiprocessors
    instructions: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def inventory() -> list[DeviceInfo]:
    """The CPU, then the GPUs that torch sees."""
    return [_cpu(), *(_gpu(name) for name in known_devices() if name.startswith("cuda"))]


def _cpu() -> DeviceInfo:
    info = _read(_CPU_INFO)
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    flags = next((line.split() for line in info.splitlines() if line.startswith("flags")), [])
    instructions = next((name for name, flag in _SETS if flag in flags), platform.machine())
    if not is_available():
        instructions += " (no native kernels: slow)"
    available = [
        line.split()[1] for line in _read(_MEMORY_INFO).splitlines() if line.startswith("MemAvailable")
    ]
    total, free = host_bytes(), int(available[0]) << 10 if available else None
    if total is not None and free is not None:
        free = min(free, total)  # a container may have less than the machine
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return DeviceInfo("cpu", names[0] if names else platform.machine(), free, total, n_cores, instructions)


def _gpu(device: str) -> DeviceInfo:
    found = torch.cuda.get_device_properties(device)
    _, total = torch.cuda.mem_get_info(device)
    version = f"sm_{found.major}{found.minor}"
    return DeviceInfo(
        device, found.name, min(usable_bytes(device), total), total, found.multi_processor_count, version
    )


def usable_bytes(gpu: str) -> int:
    """Memory of a GPU that is free, or that this process has now: a worker frees the model of its last crew."""
    return torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
