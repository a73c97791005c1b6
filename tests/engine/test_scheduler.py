"""Continuous batching: who runs, who waits, who is preempted, and that nothing is lost. No model, no torch."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from motley.engine.request import LENGTH, STOP, ContextShift, Request, TextStream
from motley.engine.scheduler import Scheduler
from motley.errors import CacheError
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import GroupSpec


class Letters:
    """A tokenizer whose token i is the letter i."""

    eog_ids = frozenset({0})

    def stream(self, *, after: Iterable[int]) -> Letters:
        return self

    def push(self, token: int) -> str:
        return chr(ord("a") + token % 26)

    def flush(self) -> str:
        return ""


def request(prompt: Iterable[int], max_tokens: int = 4, stops: tuple[str, ...] = ()) -> Request:
    return Request(
        prompt=tuple(prompt),
        sampler=lambda logits, tokens: (sum(tokens) * 7 + len(tokens)) % 97 + 1,  # depends on the whole past
        text=TextStream(Letters(), (), stops),  # type: ignore[arg-type]
        stop_ids=Letters.eog_ids,
        max_tokens=max_tokens,
    )


def scheduler(n_blocks: int = 64, n_batch: int = 32, n_parallel: int = 8) -> Scheduler:
    cache = CacheManager([GroupSpec("full", n_blocks)], 4)
    return Scheduler(cache, n_batch=n_batch, n_parallel=n_parallel)


def run(s: Scheduler, max_steps: int = 2000) -> int:
    """Drive to the end, as the engine does; returns the number of steps. The cache is checked after each."""
    ahead = None
    for n_steps in range(max_steps):
        if not s.has_work:
            return n_steps
        step = ahead if ahead is not None and s.is_next(ahead) else s.schedule()
        assert step.work
        assert step.n_tokens <= s.n_batch
        s.complete(step)
        ahead = s.foresee()
        for r, _ in step.work:
            if not r.n_pending:
                r.accept(r.sampler(None, r.tokens))
                if r.is_finished:
                    s.remove(r)
        s.cache.check_integrity()
    raise AssertionError("did not finish")


def expected(r: Request) -> list[int]:
    tokens = list(r.prompt)
    for _ in range(r.max_tokens):
        tokens.append(r.sampler(None, tokens))
    return tokens


def test_requests_run_together_and_give_their_own_answers() -> None:
    s = scheduler()
    requests = [request(range(1, n + 2)) for n in range(6)]
    for r in requests:
        s.add(r)
    assert run(s) == 4
    assert [r.tokens for r in requests] == [expected(r) for r in requests]
    assert all(r.finish_reason == LENGTH for r in requests)
    assert s.cache.stats().n_sequences == 0


def test_a_long_prompt_is_fed_in_chunks_beside_running_requests() -> None:
    s = scheduler(n_batch=8)
    short, long = request([5], max_tokens=12), request(range(1, 41))
    s.add(short)
    s.complete(s.schedule())
    short.accept(3)
    s.add(long)
    step = s.schedule()
    assert [(r is short, n) for r, n in step.work] == [(True, 1), (False, 7)]
    s.complete(step)
    short.accept(3)
    run(s)
    assert long.tokens == expected(long)


def test_a_full_cache_preempts_the_youngest_and_it_resumes_with_the_same_answer() -> None:
    s = scheduler(n_blocks=6)
    requests = [request([i, i + 1, i + 2, i + 3], max_tokens=14) for i in (1, 30, 60)]
    for r in requests:
        s.add(r)
    run(s)
    assert [r.tokens for r in requests] == [expected(r) for r in requests]


def test_random_loads_under_a_small_cache_lose_nothing() -> None:
    rng = random.Random(7)
    for _ in range(25):
        s = scheduler(
            n_blocks=rng.randint(6, 14), n_batch=rng.choice([3, 8, 32]), n_parallel=rng.randint(1, 6)
        )
        requests = [
            request([rng.randint(1, 5) for _ in range(rng.randint(1, 12))], max_tokens=rng.randint(1, 11))
            for _ in range(rng.randint(1, 10))
        ]
        for r in requests:
            s.add(r)
        run(s)
        assert [r.tokens for r in requests] == [expected(r) for r in requests]


def running(s: Scheduler, *requests: Request) -> list[Request]:
    """They have got their first token, and the step for their second has just begun."""
    for r in requests:
        s.add(r)
    s.complete(s.schedule())
    for r in requests:
        r.accept(5)
    s.complete(s.schedule())
    return list(requests)


def test_a_foreseen_step_is_the_next_one_if_every_request_got_a_token() -> None:
    s = scheduler()
    a, b = running(s, request([1, 2, 3]), request([4, 5]))
    foreseen = s.foresee()
    assert foreseen is not None
    assert not s.is_next(foreseen)  # no token has come yet
    a.accept(6)
    assert not s.is_next(foreseen)
    b.accept(7)
    assert s.is_next(foreseen)
    assert foreseen.work == s.schedule().work == [(a, 1), (b, 1)]
    assert foreseen.tokens() == [6, 7]


def test_what_was_foreseen_does_not_come_true_when_somebody_comes_or_goes() -> None:
    s = scheduler()
    a, b = running(s, request([1, 2, 3]), request([4, 5]))
    foreseen = s.foresee()
    assert foreseen is not None
    a.accept(6)
    b.accept(0)  # ends it
    s.remove(b)
    assert not s.is_next(foreseen)
    assert s.schedule().work == [(a, 1)]
    s.complete(s.schedule())
    foreseen = s.foresee()
    assert foreseen is not None
    a.accept(6)
    s.add(request([7]))
    assert not s.is_next(foreseen)
    s.cache.check_integrity()


def test_nothing_is_foreseen_that_is_sure_to_be_different() -> None:
    last = scheduler()
    running(last, request([1], max_tokens=2))
    assert last.foresee() is None  # the token that is being made is its last

    queue = scheduler(n_parallel=1)
    running(queue, request([1]))
    queue.add(request([2]))
    assert queue.foresee() is None

    full = scheduler()
    (endless,) = running(full, request([1, 2]))
    endless.shift = ContextShift(n_ctx=3, n_keep=1)
    assert full.foresee() is None  # with one more, something has to be dropped

    prompt = scheduler(n_batch=4)
    prompt.add(request(range(1, 12)))
    prompt.complete(prompt.schedule())
    assert prompt.foresee() is None  # the next step is more of it


def test_a_shared_block_is_not_copied_ahead() -> None:
    s = scheduler()
    (a,) = running(s, request([1, 2, 3, 4, 5]))
    assert a.sequence is not None
    other = s.cache.fork(a.sequence)
    before = s.cache.stats()
    assert s.foresee() is None
    assert s.cache.stats() == before
    a.accept(6)
    assert len(s.schedule().copies) == 1
    s.cache.free(other)


def test_no_room_ahead_leaves_it_to_the_next_step_to_preempt() -> None:
    s = scheduler(n_blocks=4)
    a, b = running(s, request([1, 2, 3, 4, 5], max_tokens=9), request([6, 7, 8, 9, 10], max_tokens=9))
    for _ in range(2):
        assert s.foresee() is not None
        for r in (a, b):
            r.accept(6)
        s.complete(s.schedule())
    assert s.foresee() is None  # each wants a third block
    run_on = [(r, list(r.tokens)) for r in (a, b)]
    for r in (a, b):
        r.accept(6)
    assert s.schedule().work == [(a, 1)]
    assert all(r.tokens == [*tokens, 6] for r, tokens in run_on)


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    s = scheduler(n_blocks=3)
    with pytest.raises(CacheError, match=r"19 tokens need 5 blocks.*has 3"):
        s.add(request(range(1, 17), max_tokens=4))
    assert not s.has_work


def test_a_known_prefix_is_not_computed_again() -> None:
    s = scheduler()
    first, second = request(range(1, 18), max_tokens=1), request(range(1, 18), max_tokens=1)
    s.add(first)
    run(s)
    s.add(second)
    step = s.schedule()
    assert step.work == [(second, 1)]
    assert second.n_cached == 16


def test_stop_strings_and_stop_tokens_finish_a_request() -> None:
    s = scheduler()
    r = request([3], max_tokens=50, stops=("cd",))
    s.add(r)
    for token in (0, 1, 2, 3):
        s.complete(s.schedule())
        r.accept(token + 26)  # not the end-of-generation id
    assert r.finish_reason == STOP
    assert r.completion().text == "ab"
    stopped = request([3], max_tokens=50)
    stopped.accept(0)
    assert stopped.finish_reason == STOP
    assert stopped.completion().tokens == ()


def test_cancelling_frees_the_cache_wherever_the_request_is() -> None:
    s = scheduler(n_parallel=1)
    running, waiting = request(range(1, 9)), request(range(1, 9))
    s.add(running)
    s.add(waiting)
    s.complete(s.schedule())
    for r in (waiting, running):
        s.remove(r)
    assert not s.has_work
    assert s.cache.stats().n_sequences == 0
    s.cache.check_integrity()
