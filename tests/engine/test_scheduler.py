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

    def stream(self, *, after: Iterable[int], skip_special: bool = True) -> Letters:
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
        ahead = s.plan_ahead()
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


def test_steps_have_few_rows_until_the_limit_is_lifted() -> None:
    s, counts = scheduler(), []
    s.max_rows = 3
    assert s.room_for_drafts() == 0
    requests = [request(range(50 * i, 51 * i + 4), max_tokens=12) for i in range(1, 7)]
    for r in requests:
        s.add(r)
    while s.has_work:
        if len(counts) == 8:
            s.max_rows = None
        step = s.schedule()
        counts.append((step.n_tokens, len(s.running)))
        s.complete(step)
        for r, _ in step.work:
            if not r.n_pending:
                r.accept(r.sampler(None, r.tokens))
                if r.is_finished:
                    s.remove(r)
    assert s.room_for_drafts() == s.n_batch
    assert max(counts[:8]) <= (3, 3)
    assert max(n_running for _, n_running in counts[:8]) == 3
    assert max(n_running for _, n_running in counts[8:]) == 6
    assert [r.tokens for r in requests] == [expected(r) for r in requests]


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


def test_a_step_planned_ahead_is_the_next_one_if_every_request_got_a_token() -> None:
    s = scheduler()
    a, b = running(s, request([1, 2, 3]), request([4, 5]))
    planned = s.plan_ahead()
    assert planned is not None
    assert not s.is_next(planned)  # no token has come yet
    a.accept(6)
    assert not s.is_next(planned)
    b.accept(7)
    assert s.is_next(planned)
    assert planned.work == s.schedule().work == [(a, 1), (b, 1)]
    assert planned.tokens() == [6, 7]


def test_a_step_planned_ahead_is_dropped_when_a_request_comes_or_goes() -> None:
    s = scheduler()
    a, b = running(s, request([1, 2, 3]), request([4, 5]))
    planned = s.plan_ahead()
    assert planned is not None
    a.accept(6)
    b.accept(0)  # ends it
    s.remove(b)
    assert not s.is_next(planned)
    assert s.schedule().work == [(a, 1)]
    s.complete(s.schedule())
    planned = s.plan_ahead()
    assert planned is not None
    a.accept(6)
    s.add(request([7]))
    assert not s.is_next(planned)
    s.cache.check_integrity()


def test_nothing_is_planned_ahead_that_is_certain_to_be_different() -> None:
    last = scheduler()
    running(last, request([1], max_tokens=2))
    assert last.plan_ahead() is None  # the token that is being made is its last

    queue = scheduler(n_parallel=1)
    running(queue, request([1]))
    queue.add(request([2]))
    assert queue.plan_ahead() is None

    full = scheduler()
    (endless,) = running(full, request([1, 2]))
    endless.shift = ContextShift(n_ctx=3, n_keep=1)
    assert full.plan_ahead() is None  # with one more, something has to be dropped

    prompt = scheduler(n_batch=4)
    prompt.add(request(range(1, 12)))
    prompt.complete(prompt.schedule())
    assert prompt.plan_ahead() is None  # the next step is more of it


def test_a_shared_block_is_not_copied_ahead() -> None:
    s = scheduler()
    (a,) = running(s, request([1, 2, 3, 4, 5]))
    assert a.sequence is not None
    other = s.cache.fork(a.sequence)
    before = s.cache.stats()
    assert s.plan_ahead() is None
    assert s.cache.stats() == before
    a.accept(6)
    assert len(s.schedule().copies) == 1
    s.cache.free(other)


def test_no_room_ahead_leaves_it_to_the_next_step_to_preempt() -> None:
    s = scheduler(n_blocks=4)
    a, b = running(s, request([1, 2, 3, 4, 5], max_tokens=9), request([6, 7, 8, 9, 10], max_tokens=9))
    for _ in range(2):
        assert s.plan_ahead() is not None
        for r in (a, b):
            r.accept(6)
        s.complete(s.schedule())
    assert s.plan_ahead() is None  # each wants a third block
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
    assert r.outbox.result().text == "ab"
    stopped = request([3], max_tokens=50)
    stopped.accept(0)
    assert stopped.finish_reason == STOP
    assert stopped.outbox.result().tokens == ()


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


def test_a_waiting_request_is_hashed_once_and_counted_once() -> None:
    """It is refused step after step, for want of room."""
    s = scheduler(n_blocks=8, n_batch=20)
    for r in (request(range(1, 21), max_tokens=12), request(range(30, 50), max_tokens=4)):
        s.add(r)
    hashed: list[int] = []
    key = s.cache._hasher.key
    s.cache._hasher.key = lambda parent, tokens: hashed.append(len(tokens)) or key(parent, tokens)  # type: ignore[method-assign]
    n_refusals = 0
    while s.has_work:
        before = len(hashed)
        step = s.schedule()
        n_refusals += bool(s.waiting)
        if n_refusals > 2 and s.waiting:  # in the first step there was no room for it in the batch, either
            assert len(hashed) == before
        s.complete(step)
        for r, _ in step.work:
            if not r.n_pending:
                r.accept(5)
                if r.is_finished:
                    s.remove(r)
    assert n_refusals > 5
    assert s.cache.stats().prefix.n_queries == 2


def test_blocks_of_a_request_that_was_refused_are_not_published() -> None:
    """Its last block would have been copied, had there been room for the rest."""
    s = scheduler(n_blocks=6)
    first = request(range(1, 7), max_tokens=1)
    s.add(first)
    run(s)
    holder = s.cache.open().seq
    assert s.cache.reserve(holder, 12) is not None  # three of the six blocks
    s.cache.commit(holder, range(60, 72))
    before = {block for block in range(6) if block in s.cache.groups[0].index}
    s.add(request([*range(1, 7), *range(80, 92)], max_tokens=2))
    assert not s.schedule().work
    index = s.cache.groups[0].index
    assert {block for block in range(6) if block in index} <= before
    s.cache.check_integrity()


def test_a_suspect_that_runs_alone_takes_the_blocks_of_the_others() -> None:
    s = scheduler(n_blocks=5, n_batch=8)
    one, other = request(range(1, 10)), request(range(21, 31))
    s.add(one)
    s.add(other)
    s.begin()
    assert s.schedule().requests == [one]
    s.touch([other])  # both were in the failed step
    assert s.abandon() is None
    for each in (one, other):  # each in turn, until it has got a token
        while not each.generated:
            step = s.schedule()
            assert step.requests == [each]
            s.complete(step)
            if not each.n_pending:
                s.clear(each)
                each.accept(each.sampler(None, each.tokens))
            s.cache.check_integrity()
    run(s)
    assert [one.tokens, other.tokens] == [expected(one), expected(other)]
