"""Threads that keep to their cores, and let their caller go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from motley.backends.cpu.native import core
from motley.backends.cpu.slabs import Slabs
from motley.backends.cpu.weights import RepackedTensor
from motley.formats import FORMATS, PackedTensor

pytestmark = [
    pytest.mark.skipif(core is None, reason="the native module is not built"),
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are not bound on this system"),
]


def allowed_cores() -> dict[str, str]:
    """Of each thread of this process, as the kernel lists them."""
    cores = {}
    for task in Path("/proc/self/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        cores[task.name] = next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))
    return cores


def test_workers_stay_on_their_cores_and_the_caller_only_while_it_works() -> None:
    own, last = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    before = allowed_cores()
    pool = core.Pool(3, "", [min(own), last, last])
    weight = PackedTensor.pack(torch.randn(40, 64), FORMATS["Q8_0"])
    assert RepackedTensor.of(weight, pool, Slabs()).unpack().equal(weight.unpack())
    started = {task: cores for task, cores in allowed_cores().items() if task not in before}
    assert list(started.values()) == [str(last)] * 2
    assert os.sched_getaffinity(0) == own
