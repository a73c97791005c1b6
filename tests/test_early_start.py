"""What a command begins before its imports."""

from __future__ import annotations

import ctypes
import io
import os
from pathlib import Path
from typing import Any

import pytest

from motley import compile_process, early_start, milestones, page_cache


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
    read: list[page_cache.FileRange] = []
    monkeypatch.setattr(early_start, "read_ahead", read.extend)
    early_start.read_file_ahead(str(file))
    assert read == [(str(file), 0, 1000)]


def test_milestones_are_counted_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milestones, "_marks", [])
    milestones.mark("one")
    milestones.mark("two")
    (first, early), (second, late) = milestones.since_start()
    assert (first, second) == ("one", "two")
    assert 0 <= early <= late
    milestones.mark("earlier", when=milestones._marks[0][1] - 1)
    assert milestones.since_start()[0][0] == "earlier"


class FakeDriver:
    """An H200's."""

    error = 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: object) -> int:  # noqa: N802
        value._obj.value = {75: 9, 76: 0, 97: 232448}[attribute]
        return self.error


class FakeProcess:
    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        self.stdin, self.stdout = io.StringIO(), io.StringIO()
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeProcess]:
    """The compile processes that were started; Triton's cache is in `tmp_path`, and empty."""
    made: list[FakeProcess] = []

    def start(*numbers: int) -> FakeProcess:
        made.append(FakeProcess(*numbers))
        return made[-1]

    monkeypatch.setattr(compile_process, "start", start)
    monkeypatch.setattr(compile_process, "_early", compile_process._Early())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return made


def start_compiler(driver: FakeDriver | None = None) -> None:
    early_start.start_compiler(driver or FakeDriver(), ctypes.c_int(0))  # type: ignore[arg-type]


def test_the_first_command_ever_starts_the_compile_process(processes: list[FakeProcess]) -> None:
    start_compiler()
    start_compiler()  # once
    (process,) = processes
    assert process.numbers == (90, 232448)
    assert compile_process.take(90, 232448) is process
    assert compile_process.take(90, 232448) is None
    compile_process.dismiss()
    assert not process.stdin.closed


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME", "HOME"])
def test_later_commands_start_none(
    name: str, processes: list[FakeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path if name == "TRITON_CACHE_DIR" else tmp_path / ".triton" / "cache"
    for other in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, str(tmp_path))
    assert not compile_process.has_compiled()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "motley-0123.json").write_text("{}")
    assert compile_process.has_compiled()
    start_compiler()
    assert not processes


def test_interpreted_kernels_and_odd_drivers_start_none(
    processes: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = FakeDriver()
    broken.error = 1
    start_compiler(broken)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    start_compiler()
    assert not processes


def test_a_process_that_no_model_takes_is_dismissed(processes: list[FakeProcess]) -> None:
    start_compiler()
    assert compile_process.take(86, 100 << 10) is None  # another GPU's
    compile_process.dismiss()
    assert processes[0].stdin.closed
    start_compiler()  # the model has been loaded without it
    assert len(processes) == 1


def test_a_process_that_has_ended_is_not_taken(processes: list[FakeProcess]) -> None:
    start_compiler()
    processes[0].code = 1
    assert compile_process.take(90, 232448) is None


def test_a_model_that_comes_first_starts_its_own(processes: list[FakeProcess]) -> None:
    assert compile_process.take(90, 232448) is None
    start_compiler()
    assert not processes


def test_as_many_kernels_are_compiled_at_once_as_this_process_has_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(compile_process.subprocess, "Popen", lambda command, **_: commands.append(command))
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    compile_process.start(90, 1000)
    monkeypatch.delattr(os, "sched_getaffinity")
    compile_process.start(90, 1000)
    compile_process.start(90, 1000, 7)
    assert [command[-1] for command in commands] == ["3", "192", "7"]
