"""A GPU beside a CPU: after loading, requests compile no kernel, and their answers are those of other processes.

Also on crews whose kernels no earlier test has compiled: each test has a kernel cache of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import motley
from motley.bundled import bundled_experts_path

DENSE = Path(motley.__file__).parent / "bundled" / "motley-15m-q8_0.gguf"
CREWS: dict[str, tuple[Path, dict[str, Any]]] = {
    "layer": (DENSE, {"split_mode": "layer", "tensor_split": (3, 1)}),
    "cpu first": (DENSE, {"devices": "cpu,cuda:0", "split_mode": "layer", "tensor_split": (1, 3)}),
    "tensor": (DENSE, {"split_mode": "tensor", "tensor_split": (3, 1)}),
    "experts": (bundled_experts_path(), {"n_cpu_moe": 99}),
    "some experts": (bundled_experts_path(), {"n_cpu_moe": 2}),
    "shared experts": (bundled_experts_path(), {"n_cpu_moe": 99, "expert_split": (1, 1)}),
}
# A process of its own, because the folder of compiled kernels is chosen when Triton is imported.
SCRIPT = """
import sys
from ast import literal_eval
from motley import LLM
from triton import knobs

options = {"devices": "cuda:0,cpu", "n_ctx": 512, "n_parallel": 8, "n_batch": 256, "cache_type_k": "q8_0",
           "cache_type_v": "q8_0", "prefix_cache": False}
with LLM(sys.argv[1], **options | literal_eval(sys.argv[2])) as llm:
    assert llm.compiles_ahead
    assert not llm.warm_up.failures, llm.warm_up
    early = llm.generate(list(range(3, 30)), max_tokens=4, temperature=0.0)
    assert early.error is None, early.error
    llm.finish_compiling()
    assert not llm.warm_up.failures, llm.warm_up
    n_kernels = len(llm.warm_up.kernels)
    compiled = []
    knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled.append(
        f"{src.name} {src.constants}"
    )
    for n in (1, 3, 8):
        for answer in llm.generate([list(range(3, 20 + i)) for i in range(n)], max_tokens=6, seed=1,
                                   repeat_penalty=1.1):
            assert answer.error is None, answer.error
    for length in (40, 100, 400):
        llm.generate(list(range(3, length)), max_tokens=3)
    print(f"compiled {len(compiled)} of {n_kernels}", *compiled, sep="\\n")
"""


def run(path: Path, options: dict[str, Any], cache: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), repr(options)],
        env=os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("crew", CREWS)
def test_requests_beside_a_cpu_compile_no_kernel(crew: str, tmp_path: Path) -> None:
    path, options = CREWS[crew]
    first = run(path, options, tmp_path)
    assert first.startswith("compiled 0 of "), first
    assert not first.startswith("compiled 0 of 0"), "an empty cache has no kernels"
    second = run(path, options, tmp_path)
    assert second.startswith("compiled 0 of 0"), second  # the manifests are found


@pytest.mark.parametrize("rows", ["32", "0"])
@pytest.mark.parametrize("crew", ["layer", "experts"])
def test_kernels_of_batches_that_borrow_weights_are_compiled_ahead(
    crew: str, rows: str, tmp_path: Path
) -> None:
    path, options = CREWS[crew]
    found = run(path, options, tmp_path, MOTLEY_BORROW_ROWS=rows)
    assert found.startswith("compiled 0 of "), found
