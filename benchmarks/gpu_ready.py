"""Whether a machine has what the GPU's measurements need: packages, compiled CPU kernels, a GPU that answers.

    python -m benchmarks gpu_ready [--device cuda:0] [--out FILE]

Run it first on a new machine: a missing package costs seconds here, and minutes in `gpu_report`. Fails if something is
missing. `copies_gb_s`: from pinned memory to the GPU, which bounds prompts that are multiplied by copied weights.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.reporting import Report

# What the benchmarks and tests of a GPU import, beside Motley itself; `llguidance` and the server's are not among it.
PACKAGES = (
    *("torch", "triton", "numpy", "gguf", "tokenizers", "jinja2", "typer", "rich", "prompt_toolkit"),
    *("pytest", "xdist", "pytest_timeout", "hypothesis"),
)
TEXT = "Once upon a time"


def packages() -> dict[str, Any]:
    missing = []
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name}: {error}")
    if missing:
        raise RuntimeError("; ".join(missing))
    import torch
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}


def native_kernels() -> dict[str, Any]:
    from motley.backends.cpu.native import core

    if core is None:
        raise RuntimeError("motley._core is missing: CPU devices would be the slow reference backend")
    return {"instruction_set": core.Pool(1, "", []).instruction_set, "cores": len(os.sched_getaffinity(0))}


def copies(device: str) -> dict[str, float]:
    """GB/s, the best of three."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    times = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return {"copies_gb_s": round(source.numel() / min(times) / 1e9, 1)}


def command() -> dict[str, Any]:
    """What `motley run` says: it imports more than the library does."""
    words = ["run", "-p", TEXT, "-n", "4", "--temp", "0", "--device", "cpu", "-no-cnv"]
    done = subprocess.run(
        [sys.executable, "-m", "motley", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    return {"text": done.stdout.strip()}


def answer(devices: str, **options: Any) -> dict[str, Any]:
    """What the bundled model says."""
    from motley import LLM

    with LLM(devices=devices, n_ctx=256, **options) as llm:
        said = llm.generate(TEXT, max_tokens=12, temperature=0.0).text
        return {"text": said, "load_s": round(llm.load_seconds, 2), "failures": llm.warm_up.failures}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = Report(args.out)
    report.add("packages", packages)
    report.add("native kernels", native_kernels)
    if args.device != "cpu":
        report.add("copies", lambda: copies(args.device))
    report.add("motley run", command)
    report.add("cpu", lambda: answer("cpu"))
    report.add(args.device, lambda: answer(args.device))
    report.add(f"{args.device},cpu", lambda: answer(f"{args.device},cpu", split_mode="layer"))
    raise SystemExit(any("error" in row or row.get("failures") for row in report.rows.values()))


if __name__ == "__main__":
    main()
