"""Models with recurrent states give the same logits however their tokens are computed, on every crew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_driver import CacheDriver

from motley import LLM
from motley.errors import CacheError

TOLERANCE = 1e-3
CREWS: dict[str, dict[str, Any]] = {
    "one": {},
    "1,1": {"tensor_split": (1, 1), "split_mode": "tensor"},
    "3,1": {"tensor_split": (3, 1), "split_mode": "tensor"},
    "2,1,1": {"tensor_split": (2, 1, 1), "split_mode": "tensor"},
    "2,1,1 by layers": {"tensor_split": (2, 1, 1), "split_mode": "layer"},
}


@pytest.fixture(scope="module")
def golden(shared: Path) -> Any:
    return np.load(shared / "golden" / "qwen3next" / "golden.npz")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(crew, id=name, marks=[pytest.mark.slow] if name == "2,1,1" else [])
        for name, crew in CREWS.items()
    ],
)
def driver(request: pytest.FixtureRequest, shared: Path) -> Iterator[CacheDriver]:
    options: dict[str, Any] = dict(request.param)
    if options:
        options["devices"] = ["cpu"] * len(options["tensor_split"])
    path = shared / "golden" / "qwen3next" / "model.gguf"
    with closing(CacheDriver(path, n_ctx=512, n_parallel=4, **options)) as driver:
        yield driver


@pytest.fixture
def tokens(golden: Any, driver: CacheDriver) -> list[int]:
    driver.cache.clear_prefixes()
    return [int(token) for token in golden["tokens"]]


@pytest.fixture
def expected(golden: Any) -> torch.Tensor:
    return torch.from_numpy(golden["hf/all"])


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() <= TOLERANCE
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("size", [1, 7, 64, 65, 200])
def test_chunks_give_the_same_logits(
    driver: CacheDriver, tokens: list[int], expected: torch.Tensor, size: int
) -> None:
    n_tokens = {1: 24, 7: 70}.get(size, len(tokens))
    assert_same(driver.logits(tokens[:n_tokens], repeat(size)), expected[:n_tokens])


@pytest.mark.parametrize("n_checkpoint", [40, 64, 250])
def test_a_prefix_hit_at_an_expected_checkpoint_gives_the_same_logits(
    driver: CacheDriver, tokens: list[int], expected: torch.Tensor, n_checkpoint: int
) -> None:
    first, n_cached, logits = driver.prompt(tokens, [n_checkpoint])
    assert_same(logits, expected)
    assert n_cached == 0
    second, n_cached, logits = driver.prompt(tokens)  # beside the first, from the same state
    assert n_cached == n_checkpoint
    assert_same(logits, expected[n_checkpoint:])
    driver.cache.free(first)
    driver.cache.free(second)


def test_a_prefix_hit_at_the_end_of_a_sequence_gives_the_same_logits(
    driver: CacheDriver, tokens: list[int], expected: torch.Tensor
) -> None:
    sequence, _ = driver.open()
    driver.feed(sequence, tokens[:50])
    driver.feed(sequence, tokens[50:77])
    driver.cache.free(sequence)
    sequence, n_cached, logits = driver.prompt(tokens[:120])
    assert n_cached == 77
    assert_same(logits, expected[77:120])
    driver.cache.free(sequence)


def test_a_prefix_hit_where_prompts_parted_gives_the_same_logits(
    driver: CacheDriver, tokens: list[int], expected: torch.Tensor
) -> None:
    n_common = 45
    prompts = [tokens[:n_common] + tail for tail in (tokens[100:140], tokens[150:190], tokens[n_common:100])]
    hits = []
    for prompt in prompts:
        sequence, n_cached, logits = driver.prompt(prompt)
        hits.append(n_cached)
        driver.cache.free(sequence)
    assert hits == [0, 0, n_common]
    assert_same(logits, expected[n_common:100])


@pytest.mark.parametrize("n_draft", [1, 5, 16])
def test_rejected_drafts_leave_no_trace(
    driver: CacheDriver, tokens: list[int], expected: torch.Tensor, n_draft: int
) -> None:
    sequence, _ = driver.open()
    driver.feed(sequence, tokens[:40])
    start = 40
    for n_right in range(n_draft + 1):
        wrong = [(token + 1) % 300 for token in tokens[start + 1 + n_right : start + 1 + n_draft]]
        row = [*tokens[start : start + 1 + n_right], *wrong]
        logits = driver.feed(sequence, row, n_accepted=1 + n_right)
        assert_same(logits[: 1 + n_right], expected[start : start + 1 + n_right])
        start += 1 + n_right
        if start > 200:
            break
    assert_same(driver.feed(sequence, tokens[start : start + 9]), expected[start : start + 9])
    driver.cache.free(sequence)


@pytest.mark.parametrize("n_pending", [0, 4])
def test_forks_continue_by_themselves(
    driver: CacheDriver, tokens: list[int], expected: torch.Tensor, n_pending: int
) -> None:
    sequence, _ = driver.open()
    driver.feed(sequence, tokens[:30])
    driver.feed(sequence, [*tokens[30:40], *tokens[50 : 50 + n_pending]], n_accepted=10)
    twin = driver.cache.fork(sequence)
    other = driver.cache.fork(twin)
    driver.feed(other, tokens[100:120])
    assert_same(driver.feed(sequence, tokens[40:60]), expected[40:60])
    assert_same(driver.feed(twin, tokens[40:70]), expected[40:70])
    assert_same(driver.feed(sequence, tokens[60:70]), expected[60:70])
    for each in (sequence, twin, other):
        driver.cache.free(each)
    driver.cache.check_integrity()


def test_a_session_is_loaded_by_another_crew(shared: Path, tmp_path: Path, golden: Any) -> None:
    path, tokens = shared / "golden" / "qwen3next" / "model.gguf", golden["tokens"].tolist()
    options: dict[str, Any] = {
        "backend": "reference",
        "n_ctx": 256,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
    }
    crew = {"devices": ["cpu"] * 3, "tensor_split": (2, 1, 1), "split_mode": "tensor"}
    with LLM(path, **options, **crew) as llm:
        llm.save_session(tmp_path / "session", tokens[:70])
    with LLM(path, **options) as llm:
        assert llm.load_session(tmp_path / "session") == tokens[:70]
        found = llm.generate(tokens[:80], max_tokens=5, temperature=0, ignore_eos=True)
        assert found.timings.cached_tokens == 70
        llm._loaded.cache.check_integrity()
    with LLM(path, **options, prefix_cache=False) as llm:
        assert llm.generate(tokens[:80], max_tokens=5, temperature=0, ignore_eos=True).tokens == found.tokens


def test_context_shift_is_refused_with_the_reason(shared: Path) -> None:
    with (
        LLM(shared / "golden" / "qwen3next" / "model.gguf", n_ctx=64, backend="reference") as llm,
        pytest.raises(CacheError, match="recurrent state, which cannot forget"),
    ):
        llm.generate([1, 2, 3], max_tokens=4, context_shift=True)


def test_fewer_requests_run_by_default_where_states_of_more_have_no_room(shared: Path) -> None:
    path, limit = shared / "golden" / "qwen3next" / "model.gguf", "9MiB"
    with pytest.raises(CacheError, match="states of 8 sequences"):
        LLM(path, devices="cpu", device_memory=limit, n_batch=128, n_parallel=8)
    with LLM(path, devices="cpu", device_memory=limit) as llm:
        assert (llm.engine.scheduler.n_parallel, llm.engine.scheduler.n_batch) == (1, 128)
        assert any("at most 1 request runs at a time" in notice for notice in llm.notices)
        assert llm.generate([1, 2, 3], max_tokens=4, ignore_eos=True).finish_reason == "length"
