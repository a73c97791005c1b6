"""Compiles kernels into Triton's cache: a process of its own (`compiling.Compiler`), with the arguments CAPABILITY
SHARED_MEMORY WORKERS, in which `without_torch` stands in for torch.

Reads a job on each line, until the input ends; writes [number of the line, name, seconds, error] for each, as they are
done. Needs no GPU. Jobs that are not urgent are compiled at a low priority: a model is at work meanwhile. If the model
needs the cores itself, it limits how many of them are compiled at once (`Limit`).
It imports everything once and then forks: it has no threads and has touched no GPU, so that is safe here. In the
process of the model it would not be.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pkgutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import cache, driver

from motley.backends.cuda import kernels
from motley.backends.cuda.manifests import READY, Compiled, CompiledJobs


class NoGpu:
    """The driver that Triton needs in order to compile for a GPU of a capability."""

    def __init__(self, capability: int, shared_memory: int) -> None:
        self._capability = capability
        self.shared_memory = shared_memory
        self.utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": shared_memory})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


Result = tuple[int, str, float, str | None]
_NICENESS = 19  # of a process that compiles what is not urgent


def compile_job(task: tuple[int, str]) -> Result:
    """Compile a job; gives its number, the kernel's name, the seconds, and what went wrong."""
    number, line = task
    module, name, data, is_urgent = json.loads(line)
    if not is_urgent and not os.getpriority(os.PRIO_PROCESS, 0):
        os.nice(_NICENESS)  # for good: urgent jobs come first
    started = time.perf_counter()
    try:
        function = getattr(import_module(module), name)
        launcher = Thread(target=_build_launcher_early, args=(function, data))
        launcher.start()
        try:
            kernel = function.preload(data)
        finally:
            launcher.join()
        while (
            kernel.metadata.shared > driver.active.shared_memory
        ):  # as kernels.pipeline does it at the launch
            fewer = _with_fewer_stages(data)
            if fewer is None:
                break
            data, kernel = fewer, function.preload(fewer)
        _build_launcher(kernel.src, kernel.metadata)  # found, if the signature was right
        return number, name, time.perf_counter() - started, None
    except Exception as error:  # the kernel's launch will raise it again, for its caller
        return number, name, time.perf_counter() - started, f"{type(error).__name__}: {error}"[:500]


def keep_strings() -> None:
    """Leave constants such as "int8" and "bf16" strings, as they are at a launch.

    `JITFunction.preload` takes every string that names a type for that type. The kernel is then another one, but lies
    in the cache under the same key. No kernel of ours has types among its constants.
    """
    tl.dtype.is_dtype = staticmethod(lambda name: False)


def _with_fewer_stages(data: str) -> str | None:
    """The same variant with a pipeline that takes less shared memory; None if there is none."""
    variant = json.loads(data)
    variant["options"]["num_stages"] -= 1
    return json.dumps(variant) if variant["options"]["num_stages"] else None


def _build_launcher(source: Any, metadata: Any) -> None:
    """The C function that launches a kernel. Triton has it compiled, too, where the driver's library is: a fourth of a
    second, in which the kernel itself is compiled.
    """
    try:
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(source, metadata)
    except Exception:
        return  # no driver or no compiler here, or another Triton: the first launch builds it


def _build_launcher_early(function: Any, data: str) -> None:
    """The same, from what is known before the kernel is compiled. A wrong one would do no harm: it is not found."""
    with suppress(Exception):
        variant = json.loads(data)
        signature = {name: _as_tuple(kind) for name, kind in variant["signature"].items()}
        constants = dict(zip(map(tuple, variant["constant_keys"]), variant["constant_vals"], strict=True))
        source = SimpleNamespace(fn=function, signature=signature, constants=constants)
        _build_launcher(source, SimpleNamespace())


def _as_tuple(kind: Any) -> Any:
    """JSON has no tuples."""
    return tuple(map(_as_tuple, kind)) if isinstance(kind, list) else kind


class Limit:
    """How many jobs that are not urgent are compiled at once.

    A CPU device of the model uses all cores: at a low priority, such jobs would hardly advance while requests run, and
    as many as there are cores would delay all of its threads. A few at the usual priority leave other cores alone.
    """

    def __init__(self) -> None:
        self._most: int | None = None  # None: no limit
        self._under_way: set[int] = set()
        self._changed = Condition()

    def set(self, most: int | None) -> None:
        with self._changed:
            self._most = most
            self._changed.notify_all()

    def admit(self, number: int, line: str) -> str:
        """Wait until a job may be compiled; returns it, at the usual priority if there is a limit."""
        module, name, data, is_urgent = json.loads(line)
        with self._changed:
            if is_urgent or self._most is None:
                return line
            self._changed.wait_for(lambda: self._most is None or len(self._under_way) < self._most)
            self._under_way.add(number)
        return json.dumps([module, name, data, True])

    def note_done(self, number: int) -> None:
        with self._changed:
            self._under_way.discard(number)
            self._changed.notify_all()


def _tasks(lines: Iterable[str], jobs: CompiledJobs, lock: Lock, limit: Limit) -> Iterator[tuple[int, str]]:
    """The jobs with their numbers. A line with an object is a manifest, to be written when the jobs before are done."""
    number = 0
    for line in lines:
        if line.startswith("{"):
            message = json.loads(line)
            with lock:
                jobs.expect(message["n_jobs"], Path(message["manifest"]))
        elif line.strip():
            yield number, limit.admit(number, line)
            number += 1


def _read_lines(limit: Limit, lines: SimpleQueue[str]) -> None:
    """Reads the input. A limit applies at once, to jobs that came before it, too."""
    try:
        for line in sys.stdin:
            if not line.endswith("\n"):  # the model's process was killed while it wrote
                break
            if line.startswith("{") and "n_at_once" in (message := json.loads(line)):
                limit.set(message["n_at_once"])
            else:
                lines.put(line)
    finally:
        limit.set(None)  # the model's process has ended
        lines.put("")


def import_kernels() -> None:
    """Import all kernels, before the workers are made."""
    for module in pkgutil.iter_modules(kernels.__path__):
        import_module(f"{kernels.__name__}.{module.name}")


def build_driver() -> None:
    """The C library by which Triton launches kernels. The model's process would have it compiled otherwise."""
    with suppress(Exception):  # no library of the driver or no compiler here, or another Triton
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def main() -> None:
    capability, shared_memory, n_workers = map(int, sys.argv[1:4])
    driver.set_active(NoGpu(capability, shared_memory))
    keep_strings()
    import_kernels()
    getattr(cache, "triton_key", lambda: None)()  # half a second, which each process would take for itself
    with multiprocessing.get_context("fork").Pool(n_workers) as pool:
        with suppress(OSError):
            print(f"{READY}{time.monotonic()}", flush=True)
        pool.apply_async(build_driver)
        jobs, lock = CompiledJobs(), Lock()  # the pool takes tasks on a thread of its own
        limit, lines = Limit(), SimpleQueue[str]()
        Thread(target=_read_lines, args=(limit, lines), daemon=True).start()
        for result in pool.imap_unordered(compile_job, _tasks(iter(lines.get, ""), jobs, lock, limit)):
            limit.note_done(result[0])
            with lock:
                jobs.note(result[0], Compiled(*result[1:]))
            with suppress(OSError):  # the model's process may have ended
                print(json.dumps(result), flush=True)
