"""The benchmarks of a GPU, on a CPU and with tiny models: each part runs to its end, before a GPU is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from motley.bench import random_model
from motley.bench.shapes import ExpertShape, Shape
from motley.bundled import bundled_draft_path

ROOT = Path(__file__).parents[2]
SHAPES = {
    "llama-8b": Shape(4, 256, 512, 4, 2, 64, 512, n_ctx=4096),
    "qwen3-30b-a3b": Shape(
        *(2, 256, 512, 4, 2, 64, 512), n_ctx=4096, architecture="qwen3moe", experts=ExpertShape(8, 2, 256)
    ),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(random_model, "SHAPES", SHAPES)


def rows_of(monkeypatch: pytest.MonkeyPatch, name: str, out: Path, *flags: str) -> dict[str, Any]:
    """What a benchmark of this process writes."""
    module = import_module(f"benchmarks.{name}")
    if hasattr(module, "SHAPES"):
        monkeypatch.setattr(module, "SHAPES", SHAPES)
    monkeypatch.setattr(sys, "argv", [name, *flags, "--out", str(out)])
    module.main()
    rows: dict[str, Any] = json.loads(out.read_text())
    assert not [row for row in rows.values() if "error" in row], rows
    return rows


def test_each_part_of_the_experts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--depths", "0,64", "--requests", "2,3")
    parts = "write,check,decode,prompt,batch,crews,beside"
    rows = rows_of(monkeypatch, "cuda_experts", tmp_path / "rows.json", *flags, "--only", parts)
    assert {
        "check",
        "write",
        "engine, 1 request @ 64",
        "engine, half the experts",
        "prompt",
        "3 requests",
    } <= set(rows)
    assert {"crew cpu", "crew cpu,cpu", "experts on the CPU"} <= set(rows)
    beside = rows["experts on the CPU"]
    assert {"half / all", "prompt", "details", "one layer's experts"} <= set(beside)


def test_crews_beside_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = rows_of(monkeypatch, "cuda_beside", tmp_path / "rows.json", "--device", "cpu,cpu")
    assert rows["layer 15:1"]["of own_times"] > 0
    assert {"tensor 20:1", "tensor 30:1"} <= set(rows)
    own_times = import_module("benchmarks.cuda_beside").own_times
    assert own_times([100.0, 10.0], (3, 1)) == pytest.approx(1 / (0.75 / 100 + 0.25 / 10))


def test_a_machine_without_what_is_needed_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready, out = import_module("benchmarks.gpu_ready"), tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["gpu_ready", "--device", "cpu", "--out", str(out)])
    with pytest.raises(SystemExit) as stop:
        ready.main()
    assert not stop.value.code, out.read_text()
    monkeypatch.setattr(ready, "PACKAGES", ("json", "no_such_package"))
    with pytest.raises(SystemExit) as stop:
        ready.main()
    assert stop.value.code
    assert "no_such_package" in json.loads(out.read_text())["packages"]["error"]


@pytest.mark.slow
def test_each_part_of_the_users_path(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = ["-m", "benchmarks", "user_path", "--device", "cpu", "--model", str(bundled_draft_path())]
    command += ["--n-new", "8", "--long-prompt", "60", "--n-ctx", "1024", "--out", str(out)]
    subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ, check=True, capture_output=True)
    report = json.loads(out.read_text())
    for part in import_module("benchmarks.user_path").PARTS:
        rows = report[part]
        assert "failure" not in rows, rows["failure"]
        assert not [row for row in rows.values() if isinstance(row, dict) and "error" in row], rows
    assert report["defaults"]["128 requests of 64 + 128, by the clock"]["defaults / explicit, f16"] > 0


@pytest.mark.slow
def test_drafts_that_are_right_at_a_depth(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = ["-m", "benchmarks", "speculation", "--device", "cpu", "--model", str(bundled_draft_path())]
    command += ["--right", "0.8", "--depth", "64,0", "--tokens", "32", "--rounds", "1", "--json", str(out)]
    subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ, check=True, capture_output=True)
    assert len(json.loads(out.read_text())) == 2
