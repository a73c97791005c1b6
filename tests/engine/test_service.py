"""Many threads, event loops and garbage collection around one engine."""

from __future__ import annotations

import _thread
import asyncio
import gc
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from tests.engine.by_hand import stepped_by_hand

from motley import LLM, SamplingParams
from motley.bundled import bundled_model_path
from motley.errors import RequestError
from thorough import examples

PROMPTS = ["Once upon a time", "The sea was", "He said", "In the morning", "She looked at him and", "War"]
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(bundled_model_path(), n_ctx=256, n_parallel=4, n_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, tuple[int, ...]]:
    return {prompt: llm.generate(prompt, **GREEDY).tokens for prompt in PROMPTS}


def test_idle_tasks_are_done_while_there_are_no_requests(llm: LLM) -> None:
    engine, done = llm._loaded.engine, threading.Event()
    n_tasks: list[bool] = []  # whether there was work when each was done
    llm.allow_idle_tasks()

    def fail() -> None:
        n_tasks.append(engine.has_work)
        raise ValueError("left out")

    def finish() -> None:
        n_tasks.append(engine.has_work)
        done.set()

    with stepped_by_hand(llm) as step:
        stream = llm.stream(PROMPTS[0], **GREEDY)
        llm._call(lambda: engine.idle_tasks.extend([fail, finish]))
        step(3)
        assert not n_tasks  # a request waits for its next step
    assert len(stream.finish().tokens) == GREEDY["max_tokens"]
    assert done.wait(60)
    assert n_tasks == [False, False]
    assert not engine.idle_tasks


def test_steps_of_few_rows_give_the_same_texts(llm: LLM, alone: dict[str, tuple[int, ...]]) -> None:
    engine, done = llm._loaded.engine, threading.Event()
    try:
        for max_rows in (1, 3):
            llm._call(lambda n=max_rows: engine.set_limit(n))
            found = llm.generate(PROMPTS, **GREEDY)
            assert [each.tokens for each in found] == [alone[prompt] for prompt in PROMPTS]
        llm._call(lambda: engine.plan_idle_tasks([done.set]))
        assert not engine.idle_tasks  # tasks need large steps
    finally:
        llm._call(lambda: engine.set_limit(None))
    assert done.wait(60)


def test_threads_may_all_ask_at_once(llm: LLM, alone: dict[str, tuple[int, ...]]) -> None:
    """Each thread generates, streams, scores, reads figures and cancels."""

    def use(number: int) -> None:
        for i in range(4):
            prompt = PROMPTS[(number + i) % len(PROMPTS)]
            assert llm.generate(prompt, **GREEDY).tokens == alone[prompt]
            stream = llm.stream(prompt, **GREEDY)
            next(stream)
            llm.kv_stats()
            if i % 2:
                stream.close()
            else:
                assert stream.finish().tokens == alone[prompt]
            tokens = llm.tokenizer.encode(prompt)
            assert int(llm.logits(tokens)[-1].argmax()) == alone[prompt][0]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(use, range(6)))
    assert llm.kv_stats().use.n_sequences == 0
    llm._call(llm._loaded.cache.check_integrity)


def test_coroutines_share_steps(llm: LLM, alone: dict[str, tuple[int, ...]]) -> None:
    async def streamed(prompt: str) -> str:
        return "".join([piece async for piece in llm.astream(prompt, **GREEDY)])

    async def main() -> None:
        answers = await asyncio.gather(*(llm.agenerate(prompt, **GREEDY) for prompt in PROMPTS))
        assert [answer.tokens for answer in answers] == [alone[prompt] for prompt in PROMPTS]
        assert await asyncio.gather(*map(streamed, PROMPTS)) == [answer.text for answer in answers]
        both = await llm.agenerate(PROMPTS[:2], **GREEDY)
        assert [answer.tokens for answer in both] == [alone[prompt] for prompt in PROMPTS[:2]]
        chat = await llm.achat([{"role": "user", "content": "Hello"}], max_tokens=3)
        assert chat.finish_reason in ("length", "stop")

    asyncio.run(main())


def test_a_cancelled_task_cancels_its_request(llm: LLM) -> None:
    async def main(step: Callable[[int], None]) -> None:
        task = asyncio.create_task(llm.agenerate("Once", max_tokens=200, ignore_eos=True))
        stream = llm.astream("Once", max_tokens=200, ignore_eos=True)
        await asyncio.sleep(0)  # the task has queued its request
        step(2)
        assert llm.kv_stats().use.n_sequences == 2
        task.cancel()
        stream.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await stream.finish()).finish_reason == "cancelled"

    with stepped_by_hand(llm) as step:
        asyncio.run(main(step))
    assert llm.kv_stats().use.n_sequences == 0


def test_an_event_loop_that_has_ended_does_not_disturb_the_engine(llm: LLM) -> None:
    streams: list[Any] = []

    async def leave() -> None:
        stream = llm.astream("Once", max_tokens=100, ignore_eos=True)
        streams.append((stream, asyncio.ensure_future(anext(stream))))
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    assert llm.generate("Once", **GREEDY).finish_reason == "length"
    streams[0][0].close()
    streams[0][1]._log_destroy_pending = False


def test_streams_lost_in_reference_cycles_harm_nobody(llm: LLM, alone: dict[str, tuple[int, ...]]) -> None:
    """Their finalizers run at any moment, in any thread, also inside the engine's own."""
    threshold = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        for i in range(60):
            cycle: list[Any] = [llm.stream(PROMPTS[i % 6], max_tokens=100, ignore_eos=True)]
            cycle.append(cycle)
            if i % 10 == 0:
                assert llm.generate(PROMPTS[0], **GREEDY).tokens == alone[PROMPTS[0]]
            del cycle
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert llm.generate(PROMPTS[1], **GREEDY).tokens == alone[PROMPTS[1]]
    assert llm.kv_stats().use.n_sequences == 0


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {5: -(10**400)}},
        {"temperature": 10**400},
        {"temperature": "hot"},
        {"top_k": 10**40},
        {"stop_token_ids": {10**40}},
        {"repeat_penalty": float("nan")},
        {"seed": -1},
        {"seed": True},
    ],
    ids=str,
)
def test_impossible_parameters_are_refused_before_they_reach_the_engine(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(**options)


def test_parameters_become_plain_numbers(llm: LLM) -> None:
    params = SamplingParams(
        temperature=Fraction(1, 2),  # type: ignore[arg-type]
        repeat_penalty=Fraction(3, 2),  # type: ignore[arg-type]
        seed=np.int64(5),  # type: ignore[arg-type]
        top_p=np.float32(0.5),  # type: ignore[arg-type]
        logit_bias={np.int32(7): np.float64(1.5)},  # type: ignore[dict-item]
        max_tokens=4,
    )
    assert type(params.temperature) is type(params.repeat_penalty) is type(params.top_p) is float
    assert type(params.seed) is int
    assert [(type(k), type(v)) for k, v in params.logit_bias.items()] == [(int, float)]
    assert len(llm.generate("Once", params=params).tokens) == 4


def test_the_record_of_a_request_says_where_its_time_went(llm: LLM) -> None:
    answers = llm.generate([[1, 5, i] for i in range(12)], **GREEDY)  # three times as many as run at once
    assert all(answer.timings.queued_seconds >= 0 for answer in answers)
    assert answers[-1].timings.queued_seconds > answers[0].timings.queued_seconds
    assert all(answer.timings.n_retries == 0 for answer in answers)


def test_closing_ends_waiting_threads_with_an_error() -> None:
    llm = LLM(bundled_model_path(), n_ctx=512, n_parallel=1, n_threads=1)
    seen: list[BaseException] = []
    entered = threading.Barrier(4)

    def wait() -> None:
        entered.wait()
        try:
            llm.generate("Once", max_tokens=500, ignore_eos=True)
        except RequestError as error:
            seen.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    entered.wait()
    llm.close()
    for thread in threads:
        thread.join()
    assert [error.message for error in seen] == ["this LLM is closed"] * 3
    llm.close()


def _ask(llm: LLM, answers: Any) -> None:
    try:
        llm.generate("Once", max_tokens=1)
        answers.put("answered")
    except RequestError as error:
        answers.put(error.message)


def test_a_forked_child_is_told_at_once(llm: LLM) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_ask, args=(llm, answers))
    child.start()
    try:
        assert "forked after the model was loaded" in answers.get(timeout=60)
    finally:
        child.kill()
        child.join()


def test_texts_are_scored_beside_requests_in_a_cache_that_holds_one_of_them(llm: LLM) -> None:
    """Scoring runs in portions between steps; a request that has no room beside it waits and is computed again."""
    expected = llm.generate("Once", max_tokens=40, ignore_eos=True, temperature=0).tokens
    with LLM(bundled_model_path(), n_ctx=128, n_parallel=1, n_batch=16, n_threads=1) as small:
        with ThreadPoolExecutor(3) as pool:
            scores = [pool.submit(small.logits, [5] * 120) for _ in range(3)]
            texts = [small.generate("Once", max_tokens=40, ignore_eos=True, temperature=0) for _ in range(3)]
            assert [text.tokens for text in texts] == [expected] * 3
            assert [score.result().shape[0] for score in scores] == [120] * 3
        assert small.kv_stats().use.n_sequences == 0


def test_requests_go_on_while_other_threads_call_without_end(llm: LLM) -> None:
    """Messages that come while others are handled wait for the next step."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            llm.kv_stats()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        assert len(llm.generate("Once", max_tokens=20, ignore_eos=True).tokens) == 20
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_interrupts_of_a_waiting_caller_leave_nothing_behind(llm: LLM) -> None:
    """Ctrl-C at many moments of scoring, saving and waiting: no sequence and no lock stays."""
    tokens = [5] * 200
    works = [
        lambda: llm.logits(tokens),
        lambda: llm.generate("Once", max_tokens=60, ignore_eos=True),
        lambda: llm.generate(["Once", "Two"], max_tokens=60, ignore_eos=True),
        lambda: llm.raw_sequence().feed(tokens, n_outputs=1),
        lambda: llm.kv_stats(),
    ]
    n_interrupted = 0
    for i in range(60):
        timer = threading.Timer(0.0005 * (i % 20), _thread.interrupt_main)
        try:
            timer.start()
            works[i % len(works)]()
            timer.join()
            for _ in range(1000):  # the interrupt is on its way
                pass
        except KeyboardInterrupt:
            n_interrupted += 1
        timer.join()
    assert n_interrupted > 10
    gc.collect()
    assert llm.generate("Once", **GREEDY).finish_reason == "length"
    assert llm.kv_stats().use.n_sequences == 0
    assert llm._loaded.engine.n_internal == 0


def test_a_model_and_a_stream_in_a_cycle_do_not_keep_the_process_from_ending() -> None:
    program = """
import sys
from motley import LLM
from motley.bundled import bundled_model_path
llm = LLM(bundled_model_path(), n_ctx=256, n_threads=1)
cycle = [llm, llm.stream("Once", max_tokens=200, ignore_eos=True)]
cycle.append(cycle)
next(cycle[1])
del llm, cycle
sys.exit(5)
"""
    for _ in range(examples(3)):
        assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 5


def test_a_full_context_that_is_preempted_drops_its_tokens_first(llm: LLM) -> None:
    engine = llm._loaded.engine
    request = engine.new_request([5] * 250, SamplingParams(max_tokens=20, context_shift=True, temperature=0))
    llm._service.submit(request)

    def preempt_when_full() -> bool:
        if request.is_full and request.sequence is not None:
            return engine.preempt()
        return request.is_finished

    while not llm._call(preempt_when_full):
        pass
    answer = request.outbox.result()
    assert answer.error is None
    assert len(answer.tokens) == 20
    assert llm.kv_stats().use.n_sequences == 0


def test_waiting_on_the_engine_s_own_thread_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the engine's own thread cannot wait"):
        llm._call(lambda: llm.generate("Once", max_tokens=1))


def test_wrong_types_are_refused_by_name(llm: LLM) -> None:
    for n_layers in ("2", 2.5, True, 0):
        with pytest.raises(RequestError, match="n_layer_exit"):
            llm.logits([1, 2], n_layer_exit=n_layers)  # type: ignore[arg-type]
    for prompt in (b"abc", {1, 2}, {1: 2}):
        with pytest.raises(RequestError, match="text or a list of token ids"):
            llm.generate(prompt)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate("Once", params=["a"])  # type: ignore[call-overload]
    with llm.raw_sequence() as sequence:
        for tokens in ([1.5], "abc"):
            with pytest.raises(RequestError, match="whole numbers"):
                sequence.feed(tokens)  # type: ignore[arg-type]
        assert len(sequence.feed(np.array([1, 2]))) == 2  # type: ignore[arg-type]
