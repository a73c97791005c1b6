"""Compiles kernels into Triton's cache: a process of its own (`compiling.Compiler`), with the arguments CAPABILITY
SHARED_MEMORY WORKERS, in which `without_torch` stands in for torch.

Reads a job on each line, until the input ends; writes [number of the line, name, seconds, error] for each, as they are
done. Needs no GPU. Jobs that are not urgent are compiled at a low priority: a model is at work meanwhile. If the model
needs the cores itself, it limits how many of them are compiled at once (`JobQueue`).
It imports everything once and then forks (`compile_pool`): it has no threads and has touched no GPU, so that is safe
here. In the process of the model it would not be.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import cache, driver

from motley.backends.cuda import kernels
from motley.backends.cuda.compile_pool import Died, Workers
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
_AT_ONCE = 1 << 16  # bytes that are read
_DRIVER = (-1, "")  # the first task, which is no job: see `build_driver`


def compile_job(task: tuple[int, str]) -> Result:
    """Compile a job; gives its number, the kernel's name, the seconds, and what went wrong."""
    number, line = task
    if task == _DRIVER:
        build_driver()
        return number, "", 0.0, None
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


class JobQueue:
    """The jobs that this process has read and not yet given to a worker, and the manifests that wait for them.

    A limit says how many jobs that are not urgent are compiled at once. A CPU device of the model uses all cores: at a
    low priority, such jobs would hardly advance while requests run, and as many as there are cores would delay all of
    its threads. A few at the usual priority leave other cores alone.
    """

    def __init__(self) -> None:
        self.is_complete = False  # no further lines will come
        self._rest = b""  # of a line that is not complete
        self._waiting: deque[str] = deque()
        self._n_taken = 0
        self._most: int | None = None  # None: no limit
        self._limited: set[int] = set()  # jobs that count for the limit and are being compiled
        self._compiled = CompiledJobs()

    def read(self, data: bytes) -> None:
        """Take what was read from the input; nothing: its end. A line without an end is left out: the model's process
        was killed while it wrote.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode())
        if not data:
            self.is_complete, self._most = True, None  # the model's process has ended

    def _take(self, line: str) -> None:
        if not line.startswith("{"):
            self._waiting.extend([line] if line.strip() else [])
            return
        message = json.loads(line)
        if "n_at_once" in message:  # applies to jobs that came before it, too
            self._most = message["n_at_once"]
        else:
            self._compiled.expect(message["n_jobs"], Path(message["manifest"]))

    def next(self) -> tuple[int, str] | None:
        """The next job with its number; under a limit, it has the usual priority. None: it has to wait, or is none."""
        if not self._waiting:
            return None
        module, name, data, is_urgent = json.loads(self._waiting[0])
        is_limited = self._most is not None and not is_urgent
        if is_limited and len(self._limited) >= (self._most or 0):
            return None
        number, line = self._n_taken, self._waiting.popleft()
        self._n_taken += 1
        if is_limited:
            self._limited.add(number)
            line = json.dumps([module, name, data, True])
        return number, line

    def note(self, result: Result) -> None:
        """A job is done."""
        self._limited.discard(result[0])
        self._compiled.note(result[0], Compiled(*result[1:]))


def compile_all(
    workers: Workers[tuple[int, str], Result], source: int, report: Callable[[Result], None]
) -> None:
    """Compile the jobs of a file descriptor until it ends. `report` gets each result as it comes."""
    jobs = JobQueue()
    while True:
        while workers.n_idle and (task := jobs.next()) is not None:
            workers.give(task)
        if jobs.is_complete and not workers.n_busy:
            return
        done, readable = workers.wait([] if jobs.is_complete else [source])
        for task, found in done:
            result = _failed(task, str(found)) if isinstance(found, Died) else found
            if result[0] != _DRIVER[0]:
                jobs.note(result)
                report(result)
        for each in readable:
            jobs.read(os.read(each, _AT_ONCE))


def _failed(task: tuple[int, str], why: str) -> Result:
    number, line = task
    return number, json.loads(line)[1] if line else "", 0.0, why


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
    workers = Workers(n_workers, compile_job)
    workers.give(_DRIVER)

    def report(result: Result) -> None:
        with suppress(OSError):  # the model's process may have ended
            print(json.dumps(result), flush=True)

    with suppress(OSError):
        print(f"{READY}{time.monotonic()}", flush=True)
    compile_all(workers, sys.stdin.fileno(), report)
    workers.close()
