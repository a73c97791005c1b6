"""One failing call anywhere: every other request's text is that of an undisturbed run, and nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from by_hand import stepped_by_hand
from faults import Faults

from motley import LLM, MotleyError
from motley.bundled import bundled_model_path
from motley.engine import SamplingParams, Stream, choosing, sampling
from motley.errors import DeviceError, RequestError
from motley.kvcache.blocks import BlockPool
from motley.kvcache.manager import CacheManager
from motley.kvcache.paging import PagedMemory
from motley.kvcache.store import Store
from motley.runtime.group import _Line

PROMPTS = ["Once upon a time there was a", "Once upon a time there was", "The sea was"]
CREW = {
    "devices": "cpu,cpu",
    "split_mode": "tensor",
    "backend": "reference",
}  # exchanges are Python's, and can fail
ERRORS = [DeviceError, MemoryError, KeyboardInterrupt]


def ask(llm: LLM) -> list[Stream]:
    """Three requests: two with a common prefix whose last block is copied, one whose context shifts."""
    plain = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
    streams = [llm.stream(PROMPTS[0], **plain), llm.stream(PROMPTS[1], **plain)]
    return [*streams, llm.stream(PROMPTS[2], **(plain | {"max_tokens": 28, "context_shift": True}))]


def answers(llm: LLM) -> list[tuple[int, ...] | None]:
    """The tokens of each request; None: it failed."""
    results = [stream.result() for stream in ask(llm)]
    return [None if result.error else result.tokens for result in results]


@pytest.fixture(scope="module", params=["native", "crew"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {
        "n_ctx": 24,
        "n_parallel": 3,
        "kv_block_size": 8,
        "kv_cache_demand_paged": True,
    }
    options |= {"n_threads": 1} if request.param == "native" else CREW
    with LLM(bundled_model_path(), **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> list[tuple[int, ...] | None]:
    answers(llm)  # fills the prefix cache, so that blocks are copied from then on
    return answers(llm)


def faults_of(llm: LLM, kind: str) -> Faults:
    runner, scheduler = llm._loaded.runner, llm._loaded.engine.scheduler
    places: dict[str, tuple[list[tuple[Any, str]], bool]] = {
        "run": ([(runner, "run")], False),
        "run, after its work": ([(runner, "run")], True),
        "place": ([(runner, "place")], False),
        "shift": ([(runner, "shift")], False),
        "shift, half done": ([(Store, "scatter")], False),
        "copy": ([(Store, "copy_block")], False),
        "plan ahead": ([(scheduler, "plan_ahead")], False),
        "choose": ([(choosing, "choose_rows")], False),
        "shortlist": ([(choosing, "shortlist")], False),
        "sample": ([(sampling.Sampler, "pick")], False),
        "allocate a block": ([(BlockPool, "allocate")], False),
        "allocate memory": ([(PagedMemory, "take")], False),
        "give back": ([(runner, "give_back")], False),
        "exchange": ([(_Line, "exchange")], False),
    }
    functions, after = places[kind]
    return Faults(kind, functions, after=after)


IN_PYTHON = ("shortlist", "sample")  # what the native core does not call
KINDS = [
    "run",
    "run, after its work",
    "place",
    "shift",
    "shift, half done",
    "copy",
    "plan ahead",
    "choose",
    "shortlist",
    "sample",
    "allocate a block",
    "allocate memory",
    "give back",
]


@pytest.mark.parametrize("n_tries", [12, pytest.param(10**6, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize(
    ("llm", "kind"),
    [
        *(("native", kind) for kind in KINDS),
        *(
            pytest.param("crew", kind, marks=pytest.mark.slow)
            for kind in ("exchange", "run", "shift, half done")
        ),
    ],
    indirect=["llm"],
)
def test_any_one_failing_call_is_survived(
    llm: LLM,
    undisturbed: list[tuple[int, ...] | None],
    kind: str,
    n_tries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`n_tries`: of the calls of a scenario, so many fail, one in each run; each error in turn."""
    if kind in IN_PYTHON:
        monkeypatch.setattr(llm._loaded.engine, "_chooser", choosing.HostChooser())
    faults = faults_of(llm, kind)
    with faults.armed(0, RuntimeError) as counter:
        assert answers(llm) == undisturbed
        n_calls = counter.n_calls
    assert n_calls, f"nothing calls {kind}"
    if len(llm.device_memory()) > 1:
        n_tries = min(n_tries, 3)  # a crew on the reference backend is slow
    for n in range(1, n_calls + 1, max(1, n_calls // n_tries)):
        error = ERRORS[n % len(ERRORS)]("injected")
        with faults.armed(n, error):
            found = answers(llm)
        llm._call(llm._loaded.cache.check_integrity)
        assert llm.kv_stats().use.n_sequences == 0, f"a sequence is left behind by failure {n}"
        for i, (answer, expected) in enumerate(zip(found, undisturbed, strict=True)):
            is_own_fault = answer is None and kind == "sample"
            is_recomputed = (
                i == 2 and answer is not None
            )  # a shifted context that is computed again is another one
            assert answer == expected or is_own_fault or is_recomputed, f"request {i}, failure {n}: {error!r}"
        assert answers(llm) == undisturbed, f"after failure {n}: {error!r}"


@pytest.mark.parametrize("llm", ["native"], indirect=True)
def test_a_request_that_always_fails_ends_alone(llm: LLM, undisturbed: list[tuple[int, ...] | None]) -> None:
    """Its tokens are poison for every batch that it is part of."""
    poison, runner = 77, llm._loaded.runner
    run = runner.run

    def poisoned(batch: Any, tokens: Any, copies: Any) -> Any:
        if poison in tokens:
            raise MemoryError("a plan for 77")
        return run(batch, tokens, copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", poisoned)
        good = ask(llm)
        bad = llm.stream([poison, 5, 6], max_tokens=4)
        results = [stream.result() for stream in good]
        assert [r.tokens for r in results[:2]] == undisturbed[:2]
        assert any(r.timings.n_retries for r in results)
        with pytest.raises(DeviceError, match="out of memory: a plan for 77") as failure:
            bad.finish()
        assert isinstance(failure.value.__cause__, MemoryError)
        both = llm.generate([[1, 5], [poison, 5, 6], [1, 6]], max_tokens=4, temperature=0)
    assert [r.finish_reason for r in both] == ["length", "failed", "length"]
    assert isinstance(both[1].error, MotleyError)
    llm._call(llm._loaded.cache.check_integrity)


@pytest.mark.parametrize("llm", ["native"], indirect=True)
def test_a_lone_request_that_fails_twice_ends_with_the_first_error(llm: LLM) -> None:
    numbers = iter(range(1, 10))

    def failing(batch: Any, tokens: Any, copies: Any) -> Any:
        raise DeviceError(f"failure {next(numbers)}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._loaded.runner, "run", failing)
        for message in ("failure 1", "failure 3"):
            with pytest.raises(DeviceError, match=message):
                llm.generate([5, 6, 7], max_tokens=4)
    llm._call(llm._loaded.cache.check_integrity)


def test_a_broken_engine_says_so_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(bundled_model_path(), n_ctx=64) as llm:
        scheduler = llm._loaded.engine.scheduler

        def broken(*_: Any) -> None:
            raise AssertionError("a mistake of ours")

        monkeypatch.setattr(llm._loaded.runner, "run", broken)
        monkeypatch.setattr(scheduler, "abandon", broken)
        with pytest.raises(RequestError, match="the engine has failed: AssertionError: a mistake of ours"):
            llm.generate("Once")
        with pytest.raises(RequestError, match="load the model again"):
            llm.generate("Once")


def test_an_ended_request_whose_blocks_cannot_be_freed_does_not_keep_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("injected")

    monkeypatch.setattr(CacheManager, "free", fails)
    options: dict[str, Any] = {"ignore_eos": True, "speculative": "off"}
    with LLM(bundled_model_path(), n_ctx=64, n_threads=1) as llm, stepped_by_hand(llm):
        engine = llm._loaded.engine
        ended, other = (
            engine.add(prompt, SamplingParams(max_tokens=n, **options))
            for prompt, n in (([1, 40], 1), ([1, 50], 9))
        )
        with pytest.raises(MemoryError):
            engine.step()
        with pytest.raises(MemoryError):
            engine.close(RequestError("the engine has failed"))
        assert ended.outbox.result().finish_reason == "length"
        assert other.outbox.is_finished
        assert other.outbox.result().error is not None
        monkeypatch.undo()


@pytest.mark.parametrize("llm", ["native"], indirect=True)
@pytest.mark.parametrize("kind", ["shift", "shift, half done"])
def test_after_a_shift_that_fails_midway_the_context_is_computed_again(
    llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is that of a run in which the cache refuses to shift there: no key stays at a wrong position."""
    asked = {"max_tokens": 28, "temperature": 0, "ignore_eos": True, "context_shift": True}
    with monkeypatch.context() as patch:
        shift, calls = llm._loaded.cache.shift, []
        patch.setattr(llm._loaded.cache, "shift", lambda *a: shift(*a) if calls or calls.append(1) else None)
        expected = llm.generate(PROMPTS[2], **asked)
    assert calls
    with faults_of(llm, kind).armed(1, MemoryError("injected")):
        answer = llm.generate(PROMPTS[2], **asked)
    assert answer.timings.n_retries == 1
    assert answer.tokens == expected.tokens
