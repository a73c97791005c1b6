"""Generation beyond the context: the middle is forgotten, the text flows on."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from test_scheduler import Letters

from motley import LLM
from motley.engine.request import ContextShift, Request, TextStream
from motley.engine.scheduler import Scheduler
from motley.errors import CacheError, RequestError
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import GroupSpec

N_CTX = 64


@pytest.fixture(scope="module")
def path(random_llama: Path) -> Path:
    return random_llama


def open_llm(path: Path, **options: Any) -> LLM:
    plain = {"n_ctx": N_CTX, "kv_block_size": 8, "backend": "reference", "n_parallel": 2}
    return LLM(path, **(plain | options))


def endless(llm: LLM, n: int = 200, **options: Any) -> tuple[int, ...]:
    sampling = {"max_tokens": n, "temperature": 0, "ignore_eos": True, "context_shift": True}
    answer = llm.generate("Once upon a time", **(sampling | options))
    llm._call(llm._loaded.cache.check_integrity)
    assert answer.finish_reason == "length"
    assert answer.timings.new_tokens == n
    return answer.tokens


def test_an_answer_grows_beyond_the_context(bundled: Path) -> None:
    with open_llm(bundled, backend="auto") as llm:
        tokens = endless(llm)
        plain = llm.generate("Once upon a time", temperature=0, ignore_eos=True)
        n_prompt = plain.timings.prompt_tokens
        assert plain.finish_reason == "length"
        assert len(plain.tokens) == N_CTX - n_prompt
        assert tokens[: len(plain.tokens)] == plain.tokens
        text = llm.tokenizer.decode(tokens)
    assert text.count("the") > 5  # still a story


@pytest.mark.parametrize(
    "options",
    [{"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)}, {"kv_block_size": 16}],
    ids=["crew", "other blocks"],
)
def test_neither_crew_nor_blocks_change_the_text(path: Path, options: dict[str, Any]) -> None:
    f32 = {"cache_type_k": "f32", "cache_type_v": "f32"}
    with open_llm(path, **f32) as llm, open_llm(path, **f32, **options) as other:
        assert endless(llm, 100) == endless(other, 100)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_quantized_caches_shift_as_well(path: Path, kind: str) -> None:
    """On a model whose heads are large enough to be rotated."""
    with open_llm(path, cache_type_k=kind, cache_type_v=kind) as llm:
        assert len(endless(llm, 90)) == 90


def test_windows_shift_with_the_rest(random_gemma3: Path) -> None:
    with open_llm(random_gemma3, n_batch=16, n_ctx=96) as llm:
        assert len(endless(llm, 140)) == 140
    with open_llm(random_gemma3, n_batch=16, n_ctx=40) as llm:
        assert len(endless(llm, 60)) == 60  # the window of 32 would see the kept tokens: computed again


def test_a_stream_without_an_end_can_be_left(path: Path) -> None:
    with open_llm(path) as llm:
        stream = llm.stream("Once", context_shift=True, ignore_eos=True, temperature=0)
        assert len(list(islice(stream, 150))) == 150
        stream.close()
        assert stream.completion.timings.new_tokens >= 150
        assert llm.kv_stats().n_blocks_used == 0


def test_requests_that_share_a_prefix_do_not_disturb_each_other(path: Path) -> None:
    with open_llm(path) as llm:
        alone = endless(llm, 100)
        sampling = {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "context_shift": True}
        both = llm.generate(["Once upon a time"] * 2, **sampling)
        assert [answer.tokens for answer in both] == [alone, alone]


def test_what_cannot_shift_is_refused_with_numbers(path: Path) -> None:
    with open_llm(path) as llm:
        with pytest.raises(RequestError, match="63 tokens are to be kept, but the context holds 64"):
            llm.generate("Once", context_shift=True, n_keep=63)
        with pytest.raises(RequestError, match="n_keep"):
            llm.generate("Once", n_keep=-2)
    with open_llm(path, kv_cache_tokens=16) as llm:
        assert len(endless(llm, 50)) == 50  # the cache is smaller than the context: it shifts at 16
        with pytest.raises(CacheError, match="21 tokens need 3 blocks of 8"):
            llm.generate([3] * 20, context_shift=True)


def test_random_loads_with_shifts_under_a_small_cache_end_as_they_should() -> None:
    """The scheduler alone: tokens are the last 2 of the context, so that every mix-up shows."""
    rng = random.Random(11)
    for _ in range(20):
        cache = CacheManager([GroupSpec("full", rng.randint(6, 12))], 4)
        scheduler = Scheduler(cache, n_batch=rng.choice([3, 8]), n_parallel=rng.randint(1, 4))
        requests = [make_request(rng) for _ in range(5)]
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            for shift in scheduler.shift_full():
                assert len(shift.sources) == len(shift.targets)
            step = scheduler.schedule()
            scheduler.complete(step)
            for request, _ in step.work:
                if not request.n_pending:
                    request.accept(sum(request.tokens[-2:]) % 50 + 1)
                    if request.is_finished:
                        scheduler.remove(request)
            cache.check_integrity()
            assert all(len(request.tokens) <= 21 for request in requests)
        assert [request.generated for request in requests] == [expected(request) for request in requests]


def make_request(rng: random.Random) -> Request:
    return Request(
        prompt=tuple(rng.randint(1, 50) for _ in range(rng.randint(2, 12))),
        sampler=lambda logits, tokens: 0,
        text=TextStream(Letters(), (), ()),  # type: ignore[arg-type]
        stop_ids=frozenset({0}),
        max_tokens=rng.randint(1, 60),
        shift=ContextShift(20, rng.randint(0, 10)),
    )


def expected(request: Request) -> list[int]:
    tokens = list(request.prompt)
    for _ in range(request.max_tokens or 0):
        tokens.append(sum(tokens[-2:]) % 50 + 1)
    return tokens[len(request.prompt) :]
