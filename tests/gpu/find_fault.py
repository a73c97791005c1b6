"""Finds out what makes the small model with recurrent states fail on a GPU: `python tests/gpu/find_fault.py`, one call.

Loads the model of test_on_gpu_states and asks it a few questions, in a process for each variant, and prints which of
them fail, where, and after which kernel:

    plain          as users load it
    no graphs      every batch is launched
    no overlap     no kernel starts before the one before it has ended (kernels/overlap)
    one by one     no graphs, and every kernel is waited for: names the kernel that fails
    undefined      one by one, in memory that holds NaN and 2³¹ - 1 before it is written
    f16, q8_0      other types of the cache
    bundled        the bundled models, which have no recurrent layers, with an f32 cache
    no library     without the thread that multiplies matrices to load cuBLAS (runtime.warming)
    two            two virtual devices
    compiled       after the kernels' own tests in the same process
    sanitizer      no graphs, under compute-sanitizer, if it is installed. Each tensor is an allocation of its own:
                   torch's allocator would hide what is outside of a tensor, but inside of a block of 2 MiB
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_on_gpu_states import SMALL, logits

import motley
from motley.bench import random_model, write_random_model

BUNDLED = Path(motley.__file__).parent / "bundled"
_SECONDS = 150  # for a variant; the first one compiles kernels
_UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def without_graphs() -> None:
    from motley.backends.cuda.backend import CudaBackend

    CudaBackend.__init__.__kwdefaults__["captures"] = False


def without_overlap() -> None:
    from motley.backends.cuda.kernels import overlap

    overlap.INTERPRETED = True  # what `overlapping` asks at each launch


def one_by_one() -> None:
    """Wait for each kernel; after an error, say which were the last."""
    from triton import knobs

    without_graphs()
    last: deque[str] = deque(maxlen=12)

    def wait(metadata: Any) -> None:
        last.append(str(metadata.get()["name"]))
        try:
            torch.cuda.synchronize()
        except Exception:
            print("FAILED AFTER", " ← ".join(reversed(last)), flush=True)
            raise

    knobs.runtime.launch_exit_hook.add(wait)


def without_library() -> None:
    from motley.runtime.warming import KernelWarmer

    KernelWarmer._start_libraries = lambda *_: None  # type: ignore[method-assign]


def undefined() -> None:
    one_by_one()
    torch.use_deterministic_algorithms(True)


def compiled() -> None:
    assert pytest.main(["-q", "-k", "convolution or delta_rule", str(Path(__file__).parent)]) == 0


def nothing() -> None: ...


_TWO = {"devices": "cuda:0,cuda:0", "split_mode": "tensor"}
VARIANTS: dict[str, tuple[Callable[[], None], dict[str, Any], dict[str, str]]] = {
    "plain": (nothing, {}, {}),
    "no graphs": (without_graphs, {}, {}),
    "no overlap": (without_overlap, {}, {}),
    "one by one": (one_by_one, {}, {"CUDA_LAUNCH_BLOCKING": "1"}),
    "undefined": (undefined, {}, {"CUDA_LAUNCH_BLOCKING": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    "f16": (nothing, {"cache_type_k": "f16", "cache_type_v": "f16"}, {}),
    "q8_0": (nothing, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, {}),
    "bundled": (nothing, {"path": BUNDLED / "motley-15m-q8_0.gguf"}, {}),
    "bundled, experts": (nothing, {"path": BUNDLED / "motley-experts-9m-q8_0.gguf"}, {}),
    "no library": (without_library, {}, {}),
    "two": (nothing, _TWO, {}),
    "two, one by one": (one_by_one, _TWO, {"CUDA_LAUNCH_BLOCKING": "1"}),
    "compiled": (compiled, {}, {}),
    "sanitizer": (without_graphs, {}, _UNCACHED),
    "two, sanitizer": (without_graphs, _TWO, _UNCACHED),
}


def run(variant: str, model: str) -> None:
    """In a process of its own."""
    prepare, options, _ = VARIANTS[variant]
    prepare()
    logits(**{"path": Path(model), "devices": "cuda:0"} | options)
    torch.cuda.synchronize()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "small.gguf"
        random_model.SHAPES = {"small": SMALL}
        write_random_model(model, "small", "Q8_0")
        for variant, (_, _, environment) in VARIANTS.items():
            command = [sys.executable, __file__, variant, str(model)]
            if variant.endswith("sanitizer"):
                if (tool := shutil.which("compute-sanitizer")) is None:
                    print(f"{variant}: compute-sanitizer is not installed")
                    continue
                command = [tool, "--target-processes", "all", *command]
            try:
                done = subprocess.run(
                    command,
                    env=os.environ | environment,
                    capture_output=True,
                    text=True,
                    timeout=_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                print(f"{variant}: not done after {_SECONDS} s", flush=True)
                continue
            said = (done.stdout + done.stderr).splitlines()
            print(f"{variant}: {'passes' if done.returncode == 0 else 'FAILS'}", flush=True)
            found = [line for line in said if "FAILED AFTER" in line or "=========" in line][:12]
            for line in [*found, *(said[-6:] if done.returncode else [])]:
                print(f"    {line[:200]}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run(*sys.argv[1:])
    else:
        main()
