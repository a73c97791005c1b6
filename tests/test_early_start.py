"""What a command begins before its imports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from motley import early_start, milestones


@pytest.mark.parametrize(
    ("flags", "is_used"),
    [
        ([], True),
        (["-p", "text", "-c", "4096"], True),
        (["--device", "auto"], True),
        (["--device", "cuda:0,cpu"], True),
        (["--device=cuda:0"], True),
        (["--device", "cpu"], False),
        (["-dev", "cuda:1"], False),
        (["--device=cpu"], False),
        (["-ngl", "0"], False),
        (["--main-gpu", "1"], False),
        (["--backend", "reference"], False),
    ],
)
def test_the_first_gpu_is_opened_if_the_flags_do_not_choose_others(flags: list[str], is_used: bool) -> None:
    assert early_start.uses_first_gpu(["run", *flags]) == is_used


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was begun."""
    names: list[str] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(early_start, "_start", lambda work: names.append(work.__name__))
    return names


def test_help_and_other_commands_begin_nothing(started: list[str]) -> None:
    for arguments in ([], ["--help"], ["run", "--help"], ["list"], ["serve"]):
        early_start.begin(arguments)
    assert not started


def test_a_process_of_torchrun_opens_no_gpu(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    early_start.begin(["run"])
    assert started == ["open_gpu"]
    monkeypatch.setenv("RANK", "1")
    early_start.begin(["run"])
    assert started == ["open_gpu"]


def test_the_models_file_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1000))
    assert early_start.model_file(["run", "-p", "not there.gguf", str(file)]) == str(file)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, n, __: asked.append((start, n)))
    monkeypatch.setattr(early_start, "_PIECE", 400)
    early_start.read_ahead(str(file))
    assert asked == [(0, 400), (400, 400), (800, 400)]
    monkeypatch.setattr(early_start, "_MEMORY_SHARE", 0.0)
    early_start.read_ahead(str(file))
    assert len(asked) == 3


def test_milestones_are_counted_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milestones, "_marks", [])
    milestones.mark("one")
    milestones.mark("two")
    (first, early), (second, late) = milestones.since_start()
    assert (first, second) == ("one", "two")
    assert 0 <= early <= late
