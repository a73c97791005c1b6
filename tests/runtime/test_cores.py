"""Devices on cores of their own: the same answers, and no core but theirs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from motley import LLM
from motley.errors import ConfigError

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="threads are not bound on this system"
)


@pytest.fixture(scope="module")
def model(bundled: Path) -> Path:
    return bundled


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_cores_change_no_answer_and_stay_with_the_devices(model: Path, mode: str) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("there is one core")
    names = [f"cpu:{core}" for core in allowed[:2]]
    with (
        LLM(model, devices=names, n_ctx=64, split_mode=mode) as bound,
        LLM(model, devices="cpu,cpu", n_ctx=64, split_mode=mode, n_threads=2) as free,
    ):
        assert list(bound.device_memory()) == names
        assert np.array_equal(bound.logits([1, 5, 7, 11]), free.logits([1, 5, 7, 11]))
    assert sorted(os.sched_getaffinity(0)) == allowed


def test_threads_beside_cores_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="2 threads, but the devices name their cores"):
        LLM(model, devices=f"cpu:{min(os.sched_getaffinity(0))}", n_threads=2)
