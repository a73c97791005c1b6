"""How a GPU comes to its backend, and that nobody else has to have Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from motley.backends import backend_for
from motley.errors import ConfigError, DeviceError
from motley.runtime.crew import known_devices, make_crew


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert known_devices() == ("cpu", "cuda:0", "cuda:1")
    assert [device.name for device in make_crew("cuda,cuda:1,cpu").devices] == ["cuda:0", "cuda:1", "cpu"]
    with pytest.raises(DeviceError, match="unknown device 'cuda:2'"):
        make_crew("cuda:2")


def test_a_gpu_has_one_backend() -> None:
    with pytest.raises(ConfigError, match="backend 'reference' does not run cuda:0"):
        backend_for("cuda:0", "reference")
    assert backend_for("cpu", "reference").name == "reference"


def test_motley_imports_no_triton() -> None:
    code = "import sys, motley; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_triton_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "motley.backends.cuda.backend", None)  # importing it fails
    with pytest.raises(DeviceError, match="needs Triton"):
        backend_for("cuda:0", "auto")


def test_a_cache_without_a_kernel_is_refused_before_loading() -> None:
    pytest.importorskip("triton")
    backend = backend_for("cuda:0", "auto")
    assert backend.refuses_cache("q8_0", "q4_0", 32) is None
    assert backend.refuses_cache("q5_1", "f16", 32) is None
    assert backend.refuses_cache("f16", "f16", 24) == "blocks of 24 tokens are no power of two from 16"
    assert backend_for("cpu", "reference").refuses_cache("q5_1", "f16", 7) is None
