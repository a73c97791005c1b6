"""Starts the process that compiles a GPU's kernels (backends/cuda/compile_worker.py). Needs neither torch nor Triton.

It takes more than a second to be ready. A command that finds no compiled kernels at all starts it before it imports
torch (`start_early`); the model that compiles first takes it over (`take`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Lock

MANIFEST = "motley-{}.json"  # the file in Triton's cache folder that lists the kernels compiled for a model
_WORKER = """
from motley.without_torch import stand_in

stand_in()
from motley.backends.cuda.compile_worker import main

main()
"""

Process = subprocess.Popen[str]


class _Early:
    """The process that was started early, and what it compiles for."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: Process | None = None
        self._target: tuple[int, int] | None = None
        self._is_over = False  # it comes too late now

    def start(self, target: tuple[int, int]) -> None:
        with self._lock:
            if self._process is None and not self._is_over:
                self._process, self._target = start(*target), target

    def take(self, target: tuple[int, int]) -> Process | None:
        with self._lock:
            process, self._is_over = self._process, True
            if process is None or self._target != target or process.poll() is not None:
                return None
            self._process = None
            return process

    def dismiss(self) -> None:
        with self._lock:
            process, self._process, self._is_over = self._process, None, True
        if process is not None:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()  # without input, it ends


_early = _Early()


def start(capability: int, shared_memory: int, n_workers: int | None = None) -> Process:
    """A new process. It reads jobs from its input and ends with it.

    `capability`: of the GPU, e.g. 90. `shared_memory`: bytes that a program may have there.
    """
    numbers = capability, shared_memory, n_workers or n_cores()
    # Hide the GPUs: each worker would allocate memory there. PYTHONPATH: the worker must import this package.
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    own = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    # A session of its own, and no stream of ours: Ctrl-C stops an answer, not the compiler, and a reader of our
    # output must not wait for a process that outlives us.
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER, *map(str, numbers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | own,
        start_new_session=True,
    )


def n_cores() -> int:
    """The cores that this process may use: a container often has a few of a large machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_early(capability: int, shared_memory: int) -> None:
    """Start the process for a GPU, unless a model has already started one."""
    _early.start((capability, shared_memory))


def take(capability: int, shared_memory: int) -> Process | None:
    """The process that was started early; None: there is none for such a GPU. From now on, none is started early."""
    return _early.take((capability, shared_memory))


def dismiss() -> None:
    """End the process that was started early, if no model has taken it."""
    _early.dismiss()


def has_compiled() -> bool:
    """Whether any model's kernels were compiled before on this machine."""
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(
        os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache"
    )
    return any(Path(folder).glob(MANIFEST.format("*")))
