"""Multi-token prediction layers on the GPU's kernels, interpreted: guesses are the reference's, texts stay the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from cuda_models import use_few_programs

from motley import LLM, assembly
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.kernels import delta_net, matvec
from motley.engine import Request, SamplingParams
from motley.engine.drafting.control import FixedControl

sys.path += [str(Path(__file__).parents[2] / name) for name in ("engine", "models")]
from by_hand import stepped_by_hand
from test_nextn import truth_of

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

PROMPTS = [[3, 250, 17, 42, 99], [60, 61]]
SIZES: dict[str, Any] = {
    "n_ctx": 64, "n_batch": 32, "n_parallel": 2, "kv_block_size": 16, "spec": "mtp", "draft_max": 2,
    "cache_type_k": "f32", "cache_type_v": "f32", "prefix_cache": False,
}  # fmt: skip


@pytest.fixture
def checked_launches() -> None:
    """Launches are not checked, which takes as long as they do: the kernels' own tests do that."""


def answers(llm: LLM, spec: str) -> list[Request]:
    engine = llm._loaded.engine
    engine.speculator._control = FixedControl()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, speculative=spec)
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    while engine.has_work:
        engine.step()
        engine.cache.check_integrity()
    assert not any(request.n_retries for request in requests)
    return requests


@pytest.mark.parametrize("name", ["glm4moe", "qwen3next"])
def test_texts_and_guesses_are_the_reference_s(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = truth_of(name, is_able=True).content().write(tmp_path / "nextn.gguf")
    with LLM(path, backend="reference", **SIZES) as llm, stepped_by_hand(llm):
        expected = answers(llm, "mtp")
    use_few_programs(monkeypatch)
    monkeypatch.setattr(matvec, "tile_for", lambda n: matvec.Tile(256, 2, 1))
    monkeypatch.setattr(delta_net, "_COLUMNS", 32)
    monkeypatch.setattr(assembly, "backend_for_heads", lambda *_: (CudaBackend("cpu", captures=False), None))
    monkeypatch.setattr(CudaBackend, "free_bytes", lambda _: 8 << 30)
    with LLM(path, **SIZES) as llm, stepped_by_hand(llm):
        found = answers(llm, "mtp")
    assert [request.generated for request in found] == [request.generated for request in expected]
    assert [request.drafts for request in found] == [request.drafts for request in expected]
    assert sum(request.drafts["mtp"].accepted for request in found) > 0
