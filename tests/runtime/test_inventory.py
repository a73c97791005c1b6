"""The list of devices: what is said of the CPU and of GPUs, also where the system says little or nonsense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from motley.backends import instruction_sets
from motley.cli import app
from motley.runtime import inventory

Say = Callable[[bytes | None, bytes | None], inventory.DeviceInfo]


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """The CPU of a machine whose /proc/cpuinfo and /proc/meminfo have these contents (None: there is no file)."""

    def say(about: bytes | None, memory: bytes | None) -> inventory.DeviceInfo:
        for name, content in (("_CPU_INFO", about), ("_MEMORY_INFO", memory)):
            path = tmp_path / name
            monkeypatch.setattr(inventory, name, path)
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
        return inventory.inventory()[0]

    return say


def test_the_cpu_has_a_name_memory_and_cores(cpu: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "host_bytes", lambda: 2**30)
    found = cpu(
        b"processor\t: 0\nmodel name\t: A CPU\nprocessor: 1\nmodel name: A CPU\n", b"MemAvailable:  1024 kB\n"
    )
    assert (found.device, found.name, found.free, found.total) == ("cpu", "A CPU", 2**20, 2**30)
    assert found.cores > 0
    assert cpu(b"", b"MemAvailable: 9999999999 kB").free == 2**30  # of the machine, not of its container


@pytest.mark.parametrize("about", [None, b"", b"model name", b"model name\t:\n", b"\xff\xfe"])
@pytest.mark.parametrize(
    "memory",
    [None, b"", b"MemAvailable:", b"MemAvailable: x kB", b"MemAvailable: -5 kB", b"MemAvailable: 5 MB"],
)
def test_odd_files_of_the_system_leave_out_what_they_would_say(
    cpu: Say, about: bytes | None, memory: bytes | None
) -> None:
    found = cpu(about, memory)
    assert found.name
    assert found.free is None


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["avx512_vnni", "avx512", "avx2", "portable"], "AVX-512-VNNI"),
        (["avx_vnni", "avx2", "portable"], "AVX-VNNI"),
        (["avx2", "portable"], "AVX2"),
        (["neon_i8mm", "neon_dotprod", "portable"], "NEON (i8mm)"),
        (["portable"], "riscv64 (portable kernels: slow)"),
        ([], "riscv64 (no native kernels: slow)"),
    ],
)
def test_the_instruction_set_is_that_of_the_kernels(
    cpu: Say, monkeypatch: pytest.MonkeyPatch, sets: list[str], expected: str
) -> None:
    monkeypatch.setattr(inventory, "instruction_sets", lambda: sets)
    monkeypatch.setattr(inventory.platform, "machine", lambda: "riscv64")
    assert cpu(None, None).instructions == expected


def test_every_instruction_set_of_this_machine_has_a_name() -> None:
    assert set(instruction_sets()) - {"portable", "vnni_256"} <= set(inventory._SETS)


def test_gpus_are_listed_also_those_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(major=8, minor=6, name="A GPU", multi_processor_count=82)

    def memory(device: str) -> tuple[int, int]:
        if device == "cuda:1":
            raise RuntimeError("CUDA error: devices are busy\nFor debugging …")
        return 2**30, 2**34

    monkeypatch.setattr(inventory, "known_devices", lambda: ("cpu", "cuda:0", "cuda:1"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    result = CliRunner().invoke(app, ["devices", "--json"])
    assert result.exit_code == 0, result.output
    _, gpu, broken = json.loads(result.stdout)
    expected: dict[str, Any] = {
        "device": "cuda:0",
        "name": "A GPU",
        "free": 2**30,
        "total": 2**34,
        "cores": 82,
        "instructions": "sm_86",
    }
    assert gpu == expected
    assert broken["name"] == "cannot be used: CUDA error: devices are busy"
    report = CliRunner().invoke(app, ["doctor", "--json"])
    states = [each["state"] for each in json.loads(report.stdout) if each["subject"] == "gpu"]
    assert (report.exit_code, states) == (1, ["ok", "problem"])
    table = CliRunner().invoke(app, ["devices"]).stdout
    for shown in ("device", "instructions", "cuda:0", "16.0 GiB", "sm_86", "?"):
        assert shown in table
