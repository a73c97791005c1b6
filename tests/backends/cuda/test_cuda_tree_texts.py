"""Drafts that are trees, through the engine, on the GPU's kernels under Triton's interpreter: texts stay the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from cuda_models import use_few_programs

from motley import LLM, SamplingParams, assembly
from motley.backends.cuda.backend import CudaBackend

sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))
from by_hand import stepped_by_hand
from drafters import give, right, right_last, serve

from random_models import RandomModel

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

CASES: dict[str, tuple[RandomModel, dict[str, Any]]] = {
    "tensor": (RandomModel("llama", 1, 2, 2, {}), {"devices": "cpu,cpu", "split_mode": "tensor"}),
    "layer": (RandomModel("llama", 2, 2, 1, {}), {"devices": "cpu,cpu", "split_mode": "layer"}),
    "windows": (
        RandomModel("gemma3", 1, 2, 1, {"rope.freq_base": 1e6, "attention.sliding_window": 16}),
        {},
    ),
}


@pytest.fixture
def checked_launches() -> None:
    """Launches are not checked, which takes as long as they do: the kernels' own tests do that."""


@pytest.mark.parametrize("case", CASES)
def test_texts_are_the_same_with_trees(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode with a tree beside a prompt, and trees alone; rows of K/V are moved."""
    model, options = CASES[case]
    monkeypatch.setattr(assembly, "backend_for_heads", lambda *_: (CudaBackend("cpu", captures=False), None))
    monkeypatch.setattr(CudaBackend, "free_bytes", lambda _: 8 << 30)
    use_few_programs(monkeypatch)
    prompts = [list(range(3, 22)), [5, 9]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (6, 2)]
    sizes = {"n_ctx": 48, "n_batch": 64, "n_parallel": 2, "kv_block_size": 16}
    path = model.write(tmp_path / "small.gguf")
    with LLM(path, **sizes, **options) as llm, stepped_by_hand(llm):
        engine = llm._loaded.engine
        assert engine.runner.refuses_trees is None
        give(llm, right)
        without = [tuple(request.generated) for request in serve(engine, prompts, params)]
        drafter = give(llm, right_last, draft_max=3)
        drafter.answers |= dict(zip(map(tuple, prompts), without, strict=True))
        assert [tuple(request.generated) for request in serve(engine, prompts, params)] == without
        assert max(drafter.n_accepted) == 3
