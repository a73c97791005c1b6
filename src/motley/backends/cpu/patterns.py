"""How one token's matrix products read their weights: measured on this machine, and kept in the user's cache folder.

Decode is bound by memory, and processors differ in how they like to be read: one stream or several side by side, with
or without software prefetch, in long or short pieces for each thread. So the real kernel is timed for some tenths of a
second, once for each processor, number of threads, instruction set, weight format and layout (repacked, or the file's).
MOTLEY_READ_PATTERN overrides the choice ("1,8192,75,1": streams, bytes of prefetch distance, percent of a thread's
share that it reads in one piece, 1 for non-temporal prefetches or 0), or asks to measure again ("measure").
"""

from __future__ import annotations

import json
import os
import platform
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from motley.backends.cpu.native import FORMATS, GROUP_ROWS, PLAIN_FORMATS, ROW_FORMATS, address, core
from motley.backends.cpu.slabs import Slabs
from motley.caches import cache_folder
from motley.errors import ConfigError
from motley.formats import FORMATS as LAYOUTS
from motley.units import show_bytes

VARIABLE = "MOTLEY_READ_PATTERN"
_MEASURE_AGAIN = "measure"
_MAX_STREAMS, _MAX_AHEAD = 8, 2**20
_WORTH_MEASURING = 64 * 2**20  # bytes of a format's weights; below, a step is not bound by memory
_VERSION = 7  # of the file; another one's patterns are measured again
_NUMBERS = ("cpu family", "model", "CPU implementer", "CPU part")  # of /proc/cpuinfo: x86, ARM
_MAX_FILE = 2**20  # bytes
_REPETITIONS = 5
_COLUMNS = 2048
_MATRIX_BYTES = 4 * 2**20  # of one product: threads wait for each other after each, as in a model
_MIN_BYTES, _MAX_BYTES = 128 * 2**20, 512 * 2**20  # of all products together


class ReadPattern(NamedTuple):
    """The fields of csrc/kernels.hpp's ReadPattern."""

    streams: int
    fetch_ahead: int  # bytes; 0: no software prefetch
    first_share: int  # percent
    is_once: int = 0  # 1: prefetches are non-temporal, so that caches do not keep weights

    def __str__(self) -> str:
        streams = "1 stream" if self.streams == 1 else f"{self.streams} streams"
        kind = "non-temporal prefetch" if self.is_once else "prefetch"
        fetch = f"{kind} {show_bytes(self.fetch_ahead)} ahead" if self.fetch_ahead else "no prefetch"
        return f"{streams}, {fetch}, first piece {self.first_share} % of a thread's share"

    @property
    def is_valid(self) -> bool:
        return (
            1 <= self.streams <= _MAX_STREAMS
            and 0 <= self.fetch_ahead <= _MAX_AHEAD
            and 0 <= self.first_share <= 100
            and self.is_once in (0, 1)
        )


# Where nothing is measured. On Zen 5, K-quants are read at less than half of the speed without prefetches, and a model
# decodes 5 to 11 % more slowly with prefetches that caches keep.
DEFAULT = ReadPattern(1, 4096, 75, is_once=1)
# In order of preference, where they are about as fast. The first is bound by memory on all processors: the others'
# times are compared with its time (`paired_seconds`), because the speed of memory changes. It loses little at any
# speed: on Zen 5, 4 KiB ahead are best where memory is slow, 8 KiB where it is fast.
CANDIDATES = (
    ReadPattern(1, 6144, 75, is_once=1),
    *(ReadPattern(1, ahead, 75) for ahead in (0, 512, 1024)),
    *(ReadPattern(1, ahead, 75, is_once=1) for ahead in (8192, 4096)),
    *(ReadPattern(1, ahead, 75) for ahead in (8192, 4096)),
    *(ReadPattern(streams, ahead, 75) for streams in (2, 4, 8) for ahead in (0, 1024)),
    ReadPattern(8, 1024, 0),
)
_ABOUT_AS_FAST = 0.97
_CLEARLY_SLOWER = 1.15
_LOSS, _LOSS_SHARE = 0.35, 0.05  # in cores: one busy program takes half of one; all cores lose a little
_MIN_SECONDS = 0.1  # of a loss that counts


def best_of(speeds: Mapping[ReadPattern, float]) -> ReadPattern:
    """The first pattern that is about as fast as the fastest one: measurements have errors."""
    enough = _ABOUT_AS_FAST * max(speeds.values())
    return next(pattern for pattern, speed in speeds.items() if speed >= enough)


class NotAloneError(Exception):
    """Other programs use the cores, so that times say nothing about memory."""


class CoreWatch:
    """Whether the threads of a pool had their cores for themselves. They never sleep for long, so they use all of their
    time, unless another program does.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_cores = min(n_threads, _n_own_cores())
        self._seconds = self._cpu_seconds = 0.0

    def add(self, seconds: float, cpu_seconds: float) -> None:
        self._seconds += seconds
        self._cpu_seconds += cpu_seconds

    @property
    def is_alone(self) -> bool:
        """True while there is too little to tell."""
        lost = self._n_cores * self._seconds - self._cpu_seconds
        return self._seconds < _MIN_SECONDS or lost <= max(_LOSS, _LOSS_SHARE * self._n_cores) * self._seconds


class PatternChooser:
    """Gives a pool the pattern for each format, as soon as enough weights of that format are loaded."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._n_bytes: Counter[tuple[str, bool]] = Counter()
        self.report: list[str] = []  # sentences about what was chosen
        self._given = _given_pattern()
        for number in (*FORMATS.values(), *ROW_FORMATS.values()):
            pool.set_pattern(number, *(self._given or DEFAULT))
        if self._given is not None:
            self.report.append(f"weights are read by {VARIABLE}: {self._given}")

    def add(self, form: str, n_bytes: int, is_mapped: bool = False) -> None:
        """Count a weight; the format's pattern is chosen when its weights no longer fit into caches.

        `is_mapped`: it stays in the file's layout, which another kernel reads.
        """
        had = self._n_bytes[form, is_mapped]
        self._n_bytes[form, is_mapped] += n_bytes
        if self._given is None and form in FORMATS and had < _WORTH_MEASURING <= had + n_bytes:
            self._choose(form, is_mapped)

    def _choose(self, form: str, is_mapped: bool) -> None:
        weights = f"mapped {form}" if is_mapped else form
        key = (
            f"{processor_name()} | {self._pool.n_threads} threads | {self._pool.instruction_set} | {weights}"
        )
        path = cache_file()
        pattern = None
        if path is not None and _variable() != _MEASURE_AGAIN:
            pattern = read_patterns(path).get(key)
        source = f"from {path}"
        if pattern is None:
            pattern, source = self._measured(form, is_mapped, path, key)
        numbers = ROW_FORMATS if is_mapped else FORMATS
        self._pool.set_pattern(numbers[form], *pattern)
        self.report.append(f"{weights} weights are read by {pattern} ({source})")

    def _measured(self, form: str, is_mapped: bool, path: Path | None, key: str) -> tuple[ReadPattern, str]:
        """The pattern and where it is from. Nothing is kept that was measured beside other programs."""
        try:
            speeds = measure(self._pool, form, is_mapped, CANDIDATES, None, True)
        except NotAloneError:
            return DEFAULT, "not measured, because other programs use the cores"
        pattern = best_of(speeds)
        source = f"measured now, {show_bytes(speeds[pattern])}/s"
        if path is None or not keep_pattern(path, key, pattern):
            source += f"; {path or 'a cache folder'} cannot be written"
        return pattern, source


def measure(
    pool: Any,
    form: str,
    is_mapped: bool = False,
    candidates: Sequence[ReadPattern] = CANDIDATES,
    n_bytes: int | None = None,
    is_alone_only: bool = False,
) -> dict[ReadPattern, float]:
    """Bytes per second of one token's products, with weights that no cache holds. The pool's own pattern is lost.

    `is_alone_only`: NotAloneError as soon as other programs take the cores.
    """
    layout, number = LAYOUTS[form], (ROW_FORMATS if is_mapped else FORMATS)[form]
    if is_mapped:  # its kernel reads one stream in any case
        candidates = [pattern for pattern in candidates if pattern.streams == 1]
    row_bytes = _COLUMNS // max(layout.block_size, 1) * layout.block_bytes
    n_rows = _MATRIX_BYTES // row_bytes // GROUP_ROWS * GROUP_ROWS
    n_matrices = max((n_bytes or _measured_bytes()) // (n_rows * row_bytes), 1)
    weights = Slabs().take(n_matrices * n_rows * row_bytes).view(n_matrices, -1)  # as real weights
    weights.fill_(1)  # unwritten memory would all be one page
    x, out = torch.ones(_COLUMNS), torch.empty(n_rows)
    codes = torch.zeros(core.quantized_bytes(1, _COLUMNS), dtype=torch.uint8)
    programs = []
    for pattern in candidates:
        pool.set_pattern(number, *pattern)
        program = core.Program(pool)
        for weight in weights:
            part = (address(weight), number, n_rows, 0, 0, address(out), n_rows)
            quantized = 0 if form in PLAIN_FORMATS else address(codes)
            program.matmul(address(x), _COLUMNS, quantized, 1, _COLUMNS, [part], 0, False)
        programs.append(program)

    watch = CoreWatch(pool.n_threads)

    def seconds_of(i: int) -> float:
        started, cpu_started = time.perf_counter(), time.process_time()
        programs[i].run()
        seconds = time.perf_counter() - started
        watch.add(seconds, time.process_time() - cpu_started)
        if is_alone_only and not watch.is_alone:
            raise NotAloneError
        return seconds

    seconds = paired_seconds(seconds_of, len(programs))
    return {pattern: weights.numel() / s for pattern, s in zip(candidates, seconds, strict=True)}


def paired_seconds(
    seconds_of: Callable[[int], float], n: int, repetitions: int = _REPETITIONS
) -> list[float]:
    """Seconds of n programs: the first one's best time, and for each other its median ratio to a first just before it.

    Only these ratios count, because memory can be twice as fast as a second ago: other machines use it, too. Programs
    that are clearly slower than the fastest one are run three times only.
    """
    best, ratios = float("inf"), [[1.0], *([] for _ in range(1, n))]
    others = list(range(1, n))
    for repetition in range(repetitions):
        for i in others or [0]:
            first = seconds_of(0)
            best = min(best, first)
            if i:
                ratios[i].append(seconds_of(i) / max(first, 1e-9))
        if repetition == 2:  # with three ratios, one that is wrong does not count
            enough = _CLEARLY_SLOWER * min(median(each) for each in ratios)
            others = [i for i in others if median(ratios[i]) <= enough]
    return [best * median(each) for each in ratios]


def _n_own_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measured_bytes() -> int:
    """Eight times the largest cache: with four times, a part of it was still there in the next pass, except where
    prefetches are non-temporal, which then seemed slower than others (Zen 5).
    """
    sizes = [_MIN_BYTES // 8]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) * 1024)
    return min(8 * max(sizes), _MAX_BYTES)


def _variable() -> str:
    return os.environ.get(VARIABLE, "").strip()


def _given_pattern() -> ReadPattern | None:
    text = _variable()
    if text in ("", _MEASURE_AGAIN):
        return None
    with suppress(ValueError, TypeError):
        pattern = ReadPattern(*(int(part) for part in text.split(",")))
        if pattern.is_valid:
            return pattern
    raise ConfigError(
        f"{VARIABLE}={text!r} is no reading pattern",
        hint=f"give streams (1 to {_MAX_STREAMS}), bytes of prefetch distance (0: none), the percent of its share that "
        f"a thread reads in one piece, and 1 for non-temporal prefetches, e.g. {VARIABLE}=1,0,75 or "
        f"{VARIABLE}=1,8192,75,1; or {VARIABLE}={_MEASURE_AGAIN}",
    )


def processor_name() -> str:
    """The processor's model as Linux names it, with its numbers, because virtual machines share names ("AMD EPYC"); its
    architecture elsewhere.
    """
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    numbers = [f"{name} {fields[name]}" for name in _NUMBERS if name in fields]
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({', '.join(numbers)})" if numbers else name


def cache_file() -> Path | None:
    """None for a user without a folder for caches, whose patterns are measured in each process."""
    with suppress(ConfigError):
        return cache_folder() / "read-patterns.json"
    return None


def read_patterns(path: Path) -> dict[str, ReadPattern]:
    """The file's patterns; none if the file is damaged, of another version, or missing."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_FILE:  # a pipe would never end
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return {}
    entries = content.get("patterns")
    found = {}
    for key, values in entries.items() if isinstance(entries, dict) else ():
        if isinstance(values, list) and len(values) == 4 and all(type(value) is int for value in values):
            pattern = ReadPattern(*values)
            if pattern.is_valid:
                found[key] = pattern
    return found


def keep_pattern(path: Path, key: str, pattern: ReadPattern) -> bool:
    """Add a pattern to the file; False if it cannot be written. Other processes see the old file or the new one."""
    patterns: Mapping[str, ReadPattern] = {**read_patterns(path), key: pattern}
    text = json.dumps({"version": _VERSION, "patterns": patterns}, indent=1, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError:
        return False
    return True
