"""Kernels compiled ahead of time, on all cores.

Triton compiles a kernel when it is first launched, one after the other, while all requests wait. Instead, dummy
batches run first without launches (`recording`): each variant that Triton would compile is recorded as a `Job`. A
separate process (`compile_worker`) compiles the jobs in parallel into Triton's cache on disk. After that, a first
launch only loads the compiled kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import Any

import torch
from triton import knobs
from triton.runtime import cache, driver
from triton.runtime.jit import JITFunction

from motley import compile_process
from motley.backends.cuda.kernels.bits import INTERPRETED
from motley.backends.cuda.manifests import READY, Compiled, Manifest
from motley.errors import DeviceError
from motley.milestones import mark

OnDone = Callable[[int, int], None]  # number of jobs done, number of all jobs

_recorded: ContextVar[Callable[[Job], None] | None] = ContextVar("recorded", default=None)
_asking = Lock()


@dataclass(frozen=True, order=True)
class Target:
    """A GPU architecture."""

    capability: int  # e.g. 90
    shared_memory: int  # maximum bytes per program

    @staticmethod
    def of(gpu: torch.device) -> Target:
        found: Any = torch.cuda.get_device_properties(gpu)
        return Target(10 * found.major + found.minor, found.shared_memory_per_block_optin)


@dataclass(frozen=True)
class Job:
    """A kernel's variant: the function's module and name, and Triton's data for compiling it."""

    module: str
    name: str
    data: str

    def message(self, *, is_urgent: bool = True) -> str:
        return json.dumps([self.module, self.name, self.data, is_urgent])


def is_recording() -> bool:
    """Whether kernels are recorded and not launched. The results of a run are then meaningless."""
    return _recorded.get() is not None


@contextlib.contextmanager
def recording(jobs: dict[Job, None], on_new: Callable[[Job], None] | None = None) -> Iterator[None]:
    """Record kernels that are not compiled yet in `jobs`, and launch none. `on_new` is called with each that was not
    among `jobs`, at once.

    Nor those that an earlier model of this process has compiled: the kernels before them have not run, so that what
    they read is undefined, ids and the addresses that follow from them included.

    This applies to the caller and to the devices' threads that work for it (runtime.group), not to other models.
    """

    def note(job: Job) -> None:
        if job not in jobs:
            jobs[job] = None
            if on_new is not None:
                on_new(job)

    with _asked():
        token = _recorded.set(note)
        try:
            yield
        finally:
            _recorded.reset(token)


@contextlib.contextmanager
def _asked() -> Iterator[None]:
    """Triton asks, before it compiles or launches a kernel, whether kernels are recorded in that context."""

    def note(*, fn: Any, **found: Any) -> bool:
        if (record := _recorded.get()) is None:
            return False
        record(Job(fn.module, fn.name, found["compile"]["specialization_data"]))
        return True  # Triton then does not compile

    with _asking:  # of two models that are loaded at the same time, one after the other
        before, run = knobs.runtime.jit_cache_hook, JITFunction.run

        def run_unless_recording(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return run(self, *args, grid=grid, warmup=warmup or is_recording(), **kwargs)

        knobs.runtime.jit_cache_hook, JITFunction.run = note, run_unless_recording
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook, JITFunction.run = before, run


def can_compile_ahead() -> bool:
    """Whether kernels can be compiled ahead: not if Triton interprets them."""
    return not INTERPRETED


def load_compiler() -> None:
    """Compute the key of Triton's own files, a part of the key of each kernel in its cache: half a second of hashing,
    which needs no Python.
    """
    getattr(cache, "triton_key", lambda: None)()  # not in all versions


def load_driver() -> None:
    """Load Triton's driver, without which no kernel is recorded. The first process has a C compiler make it."""
    driver.active.get_current_target()


class Compiler:
    """The compile processes. They take one or two seconds to start: create the object as early as possible."""

    def __init__(self, target: Target, n_workers: int | None = None) -> None:
        numbers = target.capability, target.shared_memory
        early = compile_process.take(*numbers) if n_workers is None else None
        self._process = early or compile_process.start(*numbers, n_workers)
        self.n_jobs = 0  # submitted so far
        self._results: dict[int, Compiled] = {}  # by the number of the job
        self._times: dict[int, float] = {}  # when they came
        self._has_ended = False
        self._changed = Condition()
        self._reader = Thread(target=self._read, name="motley-compiled", daemon=True)
        self._reader.start()

    def submit(self, jobs: Iterable[Job], *, is_urgent: bool = True) -> None:
        """Give jobs to the processes; they begin at once, in this order. A failed job is compiled at launch, with the
        full message. Jobs that are not urgent have a low priority, and must come after the urgent ones.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: it is closed
            for job in jobs:
                self._process.stdin.write(job.message(is_urgent=is_urgent) + "\n")
                self.n_jobs += 1
            self._process.stdin.flush()

    def send(self, manifest: Manifest) -> None:
        """Have a manifest written when all jobs that were submitted so far are compiled, also if this process ends
        before.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(
                json.dumps({"manifest": str(manifest.path), "n_jobs": self.n_jobs}) + "\n"
            )
            self._process.stdin.flush()

    def limit(self, n_at_once: int | None) -> None:
        """Compile so many jobs at once that are not urgent; None: as many as there are cores, at a low priority."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps({"n_at_once": n_at_once}) + "\n")
            self._process.stdin.flush()

    def is_done(self, n_jobs: int) -> bool:
        """Whether the first `n_jobs` are compiled, or never will be."""
        return self._has_ended or all(number in self._results for number in range(n_jobs))

    def when_done(self, n_jobs: int) -> float:
        """When the first `n_jobs` were compiled, on the clock of `time.monotonic`."""
        return max((self._times[number] for number in range(n_jobs)), default=time.monotonic())

    def wait(self, n_jobs: int, on_done: OnDone | None = None) -> list[Compiled]:
        """Wait for the first `n_jobs`, and return them. A failed job has an `error`."""
        with self._changed:
            while True:
                done = [self._results[i] for i in range(n_jobs) if i in self._results]
                if on_done is not None:
                    on_done(len(done), n_jobs)
                if self.is_done(n_jobs):
                    break
                self._changed.wait()
        if len(done) < n_jobs:
            raise DeviceError(
                f"the process that compiles kernels has ended with {self._process.wait()}",
                hint="they will be compiled one by one when they are first used",
            )
        return done

    def finish(self, on_done: OnDone | None = None) -> list[Compiled]:
        """Wait for all submitted jobs; there can be no others."""
        self.leave()
        return self.wait(self.n_jobs, on_done)

    def run(self, jobs: Iterable[Job], on_done: OnDone | None = None) -> list[Compiled]:
        """Compile all jobs: `submit` and `finish`."""
        self.submit(jobs)
        return self.finish(on_done)

    def leave(self) -> None:
        """Let the process compile what was submitted, and end then: the next process finds it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.close()

    def close(self) -> None:
        """Stop the process if it is still running."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # those that it has forked, too
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as results:
            for line in results:
                if line.startswith(READY):
                    mark("compiler ready", float(line.removeprefix(READY)))
                if not line.startswith("["):  # also other output of the process
                    continue
                number, *rest = json.loads(line)
                with self._changed:
                    self._results[number], self._times[number] = Compiled(*rest), time.monotonic()
                    self._changed.notify_all()
        self._process.wait()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
