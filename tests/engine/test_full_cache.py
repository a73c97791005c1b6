"""A cache that is too small for all requests at once: they wait or are preempted, and answer as they would alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from motley import LLM
from motley.engine.scheduler import Scheduler
from motley.errors import CacheError

PROMPTS = ["Once upon a time", "The cat", "Tim and Sam went to", "One day", "Lily had a", "In the park"]


@pytest.fixture(scope="module")
def path(random_llama: Path) -> Path:
    return random_llama


@pytest.fixture(scope="module")
def alone(path: Path) -> list[tuple[int, ...]]:
    """What each prompt is answered with when it has the model to itself."""
    with open_llm(path) as llm:
        return [greedy(llm, [prompt])[0] for prompt in PROMPTS]


def open_llm(path: Path, **options: Any) -> LLM:
    return LLM(path, **({"n_ctx": 128, "kv_block_size": 8, "backend": "reference"} | options))


def greedy(llm: LLM, prompts: Sequence[str]) -> list[tuple[int, ...]]:
    answers = llm.generate(list(prompts), max_tokens=40, temperature=0)
    llm._call(llm._loaded.cache.check_integrity)
    return [answer.tokens for answer in answers]


@pytest.fixture
def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the length of each request that is preempted."""
    lengths: list[int] = []
    preempt = Scheduler._preempt

    def counted(self: Scheduler, step: Any, request: Any) -> None:
        lengths.append(len(request.tokens))
        preempt(self, step, request)

    monkeypatch.setattr(Scheduler, "_preempt", counted)
    return lengths


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("n_batch", [7, 512])
def test_answers_under_a_full_cache_are_those_given_alone(
    path: Path, alone: list[tuple[int, ...]], preemptions: list[int], prefix_cache: bool, n_batch: int
) -> None:
    """88 tokens for six requests of up to 50 each."""
    with open_llm(path, kv_cache_tokens=88, prefix_cache=prefix_cache, n_batch=n_batch) as llm:
        assert greedy(llm, PROMPTS) == alone
        assert preemptions
        assert llm._loaded.cache.stats().n_sequences == 0


def test_a_limit_in_bytes_is_kept_and_answers_stay_the_same(path: Path, alone: list[tuple[int, ...]]) -> None:
    per_token = 4 * 2 * 2 * 64 * 2  # layers, KV heads, K and V, dim, f16
    with open_llm(path, kv_cache_bytes=100 * per_token) as llm:
        assert llm.memory()["kv_cache"] == 96 * per_token  # whole blocks
        assert greedy(llm, PROMPTS) == alone


def test_a_crew_under_a_full_cache_answers_the_same(path: Path, alone: list[tuple[int, ...]]) -> None:
    crew = {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)}
    with open_llm(path, kv_cache_tokens=88, **crew) as llm:
        assert greedy(llm, PROMPTS) == alone


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(path: Path) -> None:
    with open_llm(path, kv_cache_tokens=64) as llm:
        with pytest.raises(
            CacheError, match=r"104 tokens need 13 blocks of 8 .* has 8 \(64 tokens\)"
        ) as error:
            llm.generate([3] * 5, max_tokens=100)
        assert error.value.hint is not None
        assert "--kv-cache-tokens" in error.value.hint
        with pytest.raises(CacheError, match="70 tokens need 9 blocks"):
            llm.logits([1] * 70)
        assert llm.generate("Once", max_tokens=50, temperature=0, ignore_eos=True).finish_reason == "length"


def test_without_max_tokens_an_answer_ends_where_the_cache_does(path: Path) -> None:
    with open_llm(path, kv_cache_tokens=24) as llm:
        answer = llm.generate("Once upon a time", temperature=0, ignore_eos=True)
        assert answer.finish_reason == "length"
        assert answer.timings.prompt_tokens + len(answer.tokens) == 24


def test_a_cache_without_room_for_a_block_is_refused_before_loading(path: Path) -> None:
    with pytest.raises(CacheError, match="no room for a single block of 8 tokens"):
        open_llm(path, kv_cache_bytes=1000)
