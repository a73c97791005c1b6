"""The environment of a measurement: date, hardware, versions."""

from __future__ import annotations

import platform
from datetime import date
from pathlib import Path

import torch

from motley.runtime.crew import Crew


def environment(crew: Crew) -> dict[str, str]:
    names = {device.name for device in crew.devices}
    hardware = {torch.cuda.get_device_name(n) if n.startswith("cuda") else _processor() for n in names}
    return {
        "date": date.today().isoformat(),
        "device": ",".join(device.name for device in crew.devices),
        "hardware": ", ".join(sorted(hardware)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """The processor's name on Linux; on other systems its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
