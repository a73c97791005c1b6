"""Every kernel compiles for real GPUs: what the interpreter never runs, such as inline assembly, and shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

knobs = pytest.importorskip("triton").knobs


@pytest.mark.slow
def test_every_kernel_compiles(tmp_path: Path) -> None:
    try:
        knobs.nvidia.ptxas  # noqa: B018
    except RuntimeError as error:
        pytest.skip(f"Triton has no assembler for NVIDIA GPUs here: {error}")
    script = Path(__file__).parent / "compile_kernels.py"
    apart = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, script], env=os.environ | apart, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"{run.stderr}\nthe last words: {run.stdout[-200:]}"
