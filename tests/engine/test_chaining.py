"""A GPU begins the next step with tokens that the host does not know yet. No answer may depend on it.

Here the CPU plays the GPU: its chooser also gives the tokens as a tensor, and the runner takes it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from motley import LLM
from motley.engine import Engine, Request, SamplingParams
from motley.engine.choosing import ChoiceRow, HostChooser, Pending
from motley.runtime import Runner
from thorough import first


class ChainingChooser(HostChooser):
    """Chooses at once, and keeps the tokens "on the device"; an error is a token below 0, as there."""

    def choose(self, logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> Pending:
        found = super().choose(logits, rows).tokens()
        ids = [token if isinstance(token, int) else 0 for token in found]
        return Pending(lambda: found, torch.tensor(ids, dtype=torch.int32))


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets the CPU's runner be chained; the sizes of batches that were begun with tokens on the device."""
    sizes: list[int] = []
    run = Runner.run

    def watched(self: Runner, batch: Any, tokens: Any, copies: Any) -> torch.Tensor:
        if isinstance(tokens, torch.Tensor):
            sizes.append(len(tokens))
        return run(self, batch, tokens, copies)

    monkeypatch.setattr(Runner, "can_chain", True)
    monkeypatch.setattr(Runner, "run", watched)
    return sizes


def load(path: Path, *, chains: bool, **options: Any) -> LLM:
    llm = LLM(path, n_ctx=256, n_parallel=4, n_batch=64, devices="cpu", **options)
    llm._loaded.engine._chooser = ChainingChooser() if chains else HostChooser()
    return llm


def serve(
    own: Engine, rng: random.Random, n_vocab: int = 500, after_step: Callable[[], None] = lambda: None
) -> list[tuple[int, ...]]:
    """The answers to all requests that were not cancelled; they come, stop, and are cancelled at random."""
    requests: list[Request] = []
    cancelled: set[int] = set()
    for step in range(100):
        if step < 70 and rng.random() < 0.3:
            prompt = [1, *(rng.randrange(3, n_vocab) for _ in range(rng.randint(1, 70)))]
            params = SamplingParams(
                max_tokens=rng.randint(1, 50),
                temperature=rng.choice([0.0, 0.8]),
                repeat_penalty=rng.choice([1.0, 1.3]),
                seed=step,
                stop_token_ids=frozenset(range(3, 60)) if rng.random() < 0.5 else frozenset(),
            )
            requests.append(own.add(prompt, params))
        if requests and rng.random() < 0.05:
            number = rng.randrange(len(requests))
            cancelled.add(number)
            own.cancel(requests[number])
        if rng.random() < 0.03:
            own.scheduler.preempt()
        if own.scheduler.has_work:
            own.step()
            after_step()
    while own.scheduler.has_work:
        own.step()
    assert not any(request.n_retries for request in requests)
    return [tuple(r.generated) for number, r in enumerate(requests) if number not in cancelled]


@pytest.mark.parametrize("seed", first(2, range(4)))
def test_answers_are_those_of_an_engine_that_waits_for_tokens(
    bundled: Path, seed: int, chained: list[int]
) -> None:
    options: dict[str, Any] = {"kv_cache_tokens": 256, "kv_block_size": 16}
    ahead, waiting = load(bundled, chains=True, **options), load(bundled, chains=False, **options)
    answers = [serve(llm._loaded.engine, random.Random(seed)) for llm in (ahead, waiting)]
    assert answers[0] == answers[1]
    assert chained  # it did happen
    ahead._loaded.cache.check_integrity()


STATES: dict[str, Any] = {
    "backend": "reference",
    "cache_type_k": "f32",
    "cache_type_v": "f32",
    "kv_block_size": 16,
    "spec": "off",
}


@pytest.mark.parametrize("seed", first(1, (2, 0, 1)))
def test_states_do_not_include_tokens_that_turn_out_not_to_be_there(
    shared: Path, seed: int, chained: list[int]
) -> None:
    """Requests stop, and are cancelled, while the GPU computes one more token of them."""
    path = shared / "golden" / "qwen3next" / "model.gguf"
    ahead, waiting = load(path, chains=True, **STATES), load(path, chains=False, **STATES)
    answers = []
    for llm in (ahead, waiting):
        engine, check = llm._loaded.engine, llm._loaded.cache.check_integrity
        found = serve(engine, random.Random(seed), n_vocab=256, after_step=check)
        for tokens in found[:6]:  # continues at the states that the answers have left
            request = engine.add(
                [*tokens, 7, 9], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            )
            while engine.scheduler.has_work:
                engine.step()
            found.append(tuple(request.generated))
        answers.append(found)
    assert answers[0] == answers[1]
    assert chained


def test_a_second_turn_continues_at_the_state_of_the_first(shared: Path, chained: list[int]) -> None:
    with load(shared / "golden" / "qwen3next" / "model.gguf", chains=True, **STATES) as llm:
        first_turn = llm.generate([3, 50, 60], max_tokens=20, temperature=0, ignore_eos=True)
        text = [3, 50, 60, *first_turn.tokens]
        second = llm.generate([*text, 7, 9], max_tokens=8, temperature=0, ignore_eos=True)
        # The last token was never computed; one more may have been pending.
        assert second.timings.cached_tokens >= len(text) - 2
        assert chained
    with load(shared / "golden" / "qwen3next" / "model.gguf", chains=False, **STATES) as llm:
        expected = llm.generate([*text, 7, 9], max_tokens=8, temperature=0, ignore_eos=True)
    assert second.tokens == expected.tokens


def test_decoding_never_waits_for_the_host(bundled: Path, chained: list[int]) -> None:
    llm = load(bundled, chains=True)
    own = llm._loaded.engine
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    requests = [own.add([1, 50 + i, 60], params) for i in range(3)]
    while not all(request.is_finished for request in requests):
        own.step()
    assert chained == [3] * 19  # all but the prompts' step


def test_a_request_that_ends_is_dropped_from_the_step_that_runs(bundled: Path, chained: list[int]) -> None:
    llms = load(bundled, chains=True), load(bundled, chains=False)
    prompts, lengths = [[1, 50, 60], [1, 51, 61], [1, 52, 62]], [6, 12, 9]
    answers = []
    for engine in (llm._loaded.engine for llm in llms):
        requests = [
            engine.add(prompt, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
            for prompt in prompts
        ]
        for step in range(40):
            for request, n in zip(requests, lengths, strict=True):
                if step == n:
                    engine.cancel(request)
            if engine.has_work:
                engine.step()
        answers.append([tuple(request.generated) for request in requests])
    assert answers[0] == answers[1]
    assert [len(tokens) for tokens in answers[0]] == lengths


def test_a_failed_step_forgets_what_was_begun(bundled: Path, chained: list[int]) -> None:
    llm = load(bundled, chains=True)
    own = llm._loaded.engine
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    undisturbed = own.add([1, 50, 60], params)
    while own.has_work:
        own.step()
    request = own.add([1, 50, 60], params)
    for _ in range(4):
        own.step()
    run, calls = own.runner.run, []

    def failing(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the GPU is gone")
        return run(*given)

    own.runner.run = failing  # type: ignore[method-assign]
    while own.has_work:
        own.step()
    assert request.generated == undisturbed.generated
    assert request.n_retries == 1


def test_logits_that_a_raw_sequence_has_written_over_are_computed_again(
    bundled: Path, chained: list[int]
) -> None:
    with load(bundled, chains=True) as llm:
        expected = llm.generate([1, 50, 60], max_tokens=60, temperature=0, ignore_eos=True)
        stream = llm.stream([1, 50, 60], max_tokens=60, temperature=0, ignore_eos=True)
        for _ in range(15):
            llm.logits([1, 70, 71])  # the service runs it between two steps
        assert stream.finish().tokens == expected.tokens
    assert chained
