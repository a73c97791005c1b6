"""Reading patterns: every one computes the same, and the choice survives damaged files, folders and variables."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_driver import CpuBackend, run_op

from motley.backends.cpu import patterns
from motley.backends.cpu.native import FORMATS as NATIVE_FORMATS
from motley.backends.cpu.native import ROW_FORMATS, core
from motley.backends.cpu.patterns import PatternChooser, ReadPattern, keep_pattern, read_patterns
from motley.errors import ConfigError
from motley.formats import FORMATS, PackedTensor
from motley.graph.ops import MatMul
from thorough import examples

PATTERN = ReadPattern(2, 512, 40)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(patterns.VARIABLE, raising=False)
    path = patterns.cache_file()
    assert path is not None
    return path


def chooser_of(n_bytes: int, form: str = "Q8_0", is_mapped: bool = False) -> PatternChooser:
    chooser = PatternChooser(core.Pool(2))
    chooser.add(form, n_bytes, is_mapped)
    return chooser


@given(
    name=st.sampled_from(list(NATIVE_FORMATS)),
    n_rows=st.integers(1, 400),
    n_threads=st.integers(1, 5),
    pattern=st.builds(
        ReadPattern, st.integers(1, 8), st.sampled_from([0, 64, 4096]), st.integers(0, 100), st.integers(0, 1)
    ),
)
@settings(max_examples=examples(60), deadline=None)
def test_every_pattern_reads_every_row_once(
    name: str, n_rows: int, n_threads: int, pattern: ReadPattern
) -> None:
    form = FORMATS[name]
    weight = PackedTensor.pack(torch.randn(n_rows, 2 * max(form.block_size, 32)), form)
    x = torch.randn(1, weight.shape[1])
    backend = CpuBackend()
    backend.use_threads(n_threads)
    expected = run_op(backend, MatMul(), [x, weight])
    backend._pool.set_pattern(NATIVE_FORMATS[name], *pattern)
    assert torch.equal(run_op(backend, MatMul(), [x, weight]), expected)


@pytest.mark.parametrize("pattern", [(0, 0, 0), (9, 0, 0), (1, -1, 0), (1, 0, 101)])
def test_the_pool_refuses_impossible_patterns(pattern: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no such reading pattern"):
        core.Pool(1).set_pattern(0, *pattern)


def test_small_models_measure_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "measure", lambda *_: pytest.fail("measured"))
    assert not chooser_of(2**20).report
    assert not own_cache.exists()


def test_a_measured_pattern_is_kept_and_used_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "measure", lambda *_: {patterns.DEFAULT: 1e9, PATTERN: 2e9})
    (said,) = chooser_of(2**30).report
    assert "Q8_0" in said
    assert str(PATTERN) in said
    assert "measured now" in said
    monkeypatch.setattr(patterns, "measure", lambda *_: pytest.fail("measured again"))
    (said,) = chooser_of(2**30).report
    assert str(PATTERN) in said
    assert str(own_cache) in said
    monkeypatch.setenv(patterns.VARIABLE, " measure ")
    monkeypatch.setattr(patterns, "measure", lambda *_: {patterns.DEFAULT: 1e9})
    (said,) = chooser_of(2**30).report
    assert str(patterns.DEFAULT) in said
    assert "measured now" in said


def test_each_format_has_a_pattern_of_its_own(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "measure", lambda *_: {PATTERN: 2e9})
    for form in ("Q8_0", "Q4_K"):
        assert "measured now" in chooser_of(2**30, form).report[0]
    assert len(read_patterns(own_cache)) == 2


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'{"version": 5, "patterns": {"a": [1, 0, 0, 0]}}',
        b'{"version": 6}',
        b'{"version": 6, "patterns": [3]}',
        b'{"version": 6, "patterns": {"a": [1, 0, 0], "b": "x", "c": [99, 0, 0, 0], "d": [1, true, 0, 0]}}',
        b'{"version": 6, "patterns": {"e": [1, 0, 0, 2]}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_as_good_as_none(own_cache: Path, damage: bytes) -> None:
    own_cache.parent.mkdir()
    own_cache.write_bytes(damage)
    assert read_patterns(own_cache) == {}
    assert keep_pattern(own_cache, "key", PATTERN)
    assert read_patterns(own_cache) == {"key": PATTERN}
    assert list(own_cache.parent.iterdir()) == [own_cache]


@pytest.mark.parametrize("kind", ["folder", "pipe", "endless", "large", "dangling", "loop"])
def test_something_else_of_that_name_is_not_read(own_cache: Path, kind: str) -> None:
    own_cache.parent.mkdir()
    if kind == "folder":
        own_cache.mkdir()
    elif kind == "pipe":
        os.mkfifo(own_cache)
    elif kind == "large":
        with own_cache.open("w") as file:
            file.truncate(2**40)
    else:
        targets = {"endless": Path("/dev/zero"), "dangling": own_cache / "nothing", "loop": own_cache}
        own_cache.symlink_to(targets[kind])
    assert read_patterns(own_cache) == {}
    assert keep_pattern(own_cache, "key", PATTERN) == (kind != "folder")
    assert read_patterns(own_cache) == ({} if kind == "folder" else {"key": PATTERN})


def test_a_full_disk_leaves_nothing_behind(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("os.replace", fail)
    assert not keep_pattern(own_cache, "key", PATTERN)
    assert list(own_cache.parent.iterdir()) == []


def test_processors_with_the_same_name_have_patterns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: {}\nmodel name\t: AMD EPYC\nflags\t: x:y\n\nmodel\t: 99\n"
    names = []
    for model in (1, 17):
        text = cpuinfo.format(model)
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text, **__: text)
        names.append(patterns.processor_name())
    assert names == ["AMD EPYC (cpu family 25, model 1)", "AMD EPYC (cpu family 25, model 17)"]


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(patterns, "measure", lambda *_: {PATTERN: 2e9})
    assert "cannot be written" in chooser_of(2**30).report[0]


def test_a_user_without_a_cache_folder_measures_in_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", "~")
    monkeypatch.setattr(patterns, "measure", lambda *_: {PATTERN: 2e9})
    assert "a cache folder cannot be written" in chooser_of(2**30).report[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "pattern"), [("2,512,40", PATTERN), ("1,8192,75,1", ReadPattern(1, 8192, 75, is_once=1))]
)
def test_the_variable_overrides_the_choice(
    given: str, pattern: ReadPattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(patterns.VARIABLE, given)
    monkeypatch.setattr(patterns, "measure", lambda *_: pytest.fail("measured"))
    (said,) = chooser_of(2**30).report
    assert patterns.VARIABLE in said
    assert str(pattern) in said


@pytest.mark.parametrize(
    "text", ["x", "1", "1,2", "1,0,0,2", "1,0,0,0,0", "0,0,0", "1,0,101", "9,0,0", "1.5,0,0"]
)
def test_a_variable_that_is_no_pattern_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patterns.VARIABLE, text)
    with pytest.raises(ConfigError, match=patterns.VARIABLE):
        chooser_of(0)


def test_of_patterns_that_are_about_as_fast_the_preferred_one_is_taken() -> None:
    assert patterns.best_of({patterns.DEFAULT: 98.0, PATTERN: 100.0}) == patterns.DEFAULT
    assert patterns.best_of({patterns.DEFAULT: 90.0, PATTERN: 100.0}) == PATTERN


@pytest.mark.parametrize("change_at", [0, 1, 7, 12, 20, 29, 99])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_memory_that_changes_its_speed_does_not_change_the_choice(change_at: int, factor: float) -> None:
    true_seconds = [1.0, 1.2, 0.9, 1.1]
    n_runs = 0

    def seconds_of(i: int) -> float:
        nonlocal n_runs
        n_runs += 1
        return true_seconds[i] * (factor if n_runs > change_at else 1.0)

    found = patterns.paired_seconds(seconds_of, len(true_seconds))
    assert [each / found[0] for each in found] == pytest.approx(true_seconds)


def test_clearly_slower_programs_are_run_three_times_only() -> None:
    runs: list[int] = []

    def seconds_of(i: int) -> float:
        runs.append(i)
        return (1.0, 1.1, 2.0)[i]

    assert patterns.paired_seconds(seconds_of, 3, 5) == pytest.approx([1.0, 1.1, 2.0])
    assert (runs.count(1), runs.count(2)) == (5, 3)
    assert patterns.paired_seconds(lambda _: 0.5, 1) == [0.5]


def test_the_real_kernel_is_measured() -> None:
    candidates = (patterns.DEFAULT, PATTERN)
    for form in ("F16", "Q4_K"):
        speeds = patterns.measure(core.Pool(2), form, False, candidates, n_bytes=2**24)
        assert set(speeds) == set(candidates)
        assert all(speed > 0 for speed in speeds.values())


def test_a_mapped_files_layout_is_measured_with_its_own_kernel() -> None:
    measured: list[int] = []

    class Pool:
        def set_pattern(self, number: int, *_: int) -> None:
            measured.append(number)
            raise InterruptedError

    for is_mapped, numbers in ((False, NATIVE_FORMATS), (True, ROW_FORMATS)):
        with pytest.raises(InterruptedError):
            patterns.measure(Pool(), "Q8_0", is_mapped, n_bytes=2**22)
        assert measured.pop() == numbers["Q8_0"]
    speeds = patterns.measure(core.Pool(2), "Q8_0", True, (patterns.DEFAULT, PATTERN), n_bytes=2**24)
    assert set(speeds) == {patterns.DEFAULT}  # the only one with one stream


def test_mapped_weights_have_a_pattern_of_their_own(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = PackedTensor(torch.zeros(32 * 2**10, 64 * 34, dtype=torch.uint8), FORMATS["Q8_0"])  # 68 MiB
    monkeypatch.setattr(patterns, "measure", lambda *given: {ReadPattern(1, 512 << given[2], 75): 2e9})
    for n_bytes, expected in ((2**30, 1024), (2**20, 512)):
        backend = CpuBackend()
        backend.expect_weights(n_bytes)
        backend.load(weight)
        (said,) = backend._patterns.report
        assert str(ReadPattern(1, expected, 75)) in said
        assert said.startswith("mapped") == (n_bytes == 2**30)
    assert len(read_patterns(own_cache)) == 2


def test_beside_other_programs_nothing_is_measured_or_kept(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "_MIN_SECONDS", 0.0)
    monkeypatch.setattr(patterns, "_measured_bytes", lambda: 2**24)
    monkeypatch.setattr("time.process_time", lambda: 0.0)  # the threads do not run
    (said,) = chooser_of(2**30).report
    assert str(patterns.DEFAULT) in said
    assert "other programs" in said
    assert not own_cache.exists()


@pytest.mark.parametrize(
    ("cpu_seconds", "is_alone"), [(0.2, True), (0.17, True), (0.15, False), (0.1, False)]
)
def test_threads_that_lose_a_fifth_of_their_time_are_not_alone(
    cpu_seconds: float, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "_n_own_cores", lambda: 2)
    watch = patterns.CoreWatch(8)  # more threads than cores use all of the cores
    watch.add(0.05, 0.0)
    assert watch.is_alone  # too early to tell
    watch.add(0.05, cpu_seconds)
    assert watch.is_alone == is_alone


def test_the_file_is_readable(own_cache: Path) -> None:
    keep_pattern(own_cache, "some processor | 2 threads | avx2 | Q8_0", PATTERN)
    content = json.loads(own_cache.read_text())
    assert content["patterns"] == {"some processor | 2 threads | avx2 | Q8_0": [2, 512, 40, 0]}


def test_the_instruction_set_can_be_chosen_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_INSTRUCTION_SET", "portable")
    assert "portable kernels" in CpuBackend().details[0]
    monkeypatch.setenv("MOTLEY_INSTRUCTION_SET", "sparc")
    with pytest.raises(ConfigError, match="sparc"):
        CpuBackend()
