"""The devices of this machine, as shown to users: names, memory, cores, instruction sets."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from motley.backends import instruction_sets
from motley.runtime.budget import host_bytes
from motley.runtime.crew import known_devices

_CPU_INFO, _MEMORY_INFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
# The names of the instruction sets that kernels are compiled for.
_SETS = {
    "avx512_vnni": "AVX-512-VNNI",
    "avx512": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx2": "AVX2",
    "neon_i8mm": "NEON (i8mm)",
    "neon_dotprod": "NEON (dotprod)",
}


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
    names, total, free = _values(_CPU_INFO, "model name"), host_bytes(), _available_bytes()
    if total is not None and free is not None:
        free = min(free, total)  # a container may have less than the machine
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return DeviceInfo("cpu", names[0] if names else platform.machine(), free, total, n_cores, _kernels())


def _kernels() -> str:
    """The instruction set of the kernels that run here unless the user chooses others."""
    best = next(iter(instruction_sets()), None)
    if best is None:
        return f"{platform.machine()} (no native kernels: slow)"
    return _SETS.get(best) or f"{platform.machine()} ({best} kernels: slow)"


def _available_bytes() -> int | None:
    """Memory that programs can still have; None if Linux does not say it in a known form."""
    values = [value.split() for value in _values(_MEMORY_INFO, "MemAvailable")]
    is_known = values and len(values[0]) == 2 and values[0][0].isdecimal() and values[0][1] == "kB"
    return int(values[0][0]) << 10 if is_known else None


def _gpu(device: str) -> DeviceInfo:
    try:
        found = torch.cuda.get_device_properties(device)
        _, total = torch.cuda.mem_get_info(device)
        free = min(usable_bytes(device), total)
    except RuntimeError as error:  # a GPU that is broken, or that another process has for itself
        why = (str(error).splitlines() or ["it fails"])[0]
        return DeviceInfo(device, f"cannot be used: {why}", None, None, 0, "?")
    version = f"sm_{found.major}{found.minor}"
    return DeviceInfo(device, found.name, free, total, found.multi_processor_count, version)


def usable_bytes(gpu: str) -> int:
    """Memory of a GPU that is free, or that this process has now: a worker frees the model of its last crew."""
    return torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu)


def _values(path: Path, name: str) -> list[str]:
    """The values of a name in a file with a name, a colon and a value on each line; none without the file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    pairs = [line.partition(":") for line in lines]
    return [value.strip() for key, _, value in pairs if key.strip() == name and value.strip()]
