"""Rounds of drafts in one native call give the drafts of rounds one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from motley import LLM
from motley.bundled import bundled_draft_path, bundled_model_path
from motley.engine import SamplingParams
from motley.engine.drafting.control import FixedControl

PROMPTS = ["Once upon a time there was a", "The little dog", "One day, a girl named Lily went to the"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"n_ctx": 256, "n_parallel": 3, "kv_block_size": 8}
    with LLM(bundled_model_path(), draft_model=bundled_draft_path(), **options) as llm:
        yield llm


def answers(llm: LLM, spec: str, monkeypatch: pytest.MonkeyPatch, *, has_rounds: bool) -> tuple[Any, int]:
    """All tokens and all drafts of three requests, one of them greedy, and the number of native calls for rounds."""
    engine = llm._loaded.engine
    runners = {id(r): r for d in engine.speculator._drafters if (r := _runner(d)) is not None}.values()
    n_calls, drafts = 0, []
    with monkeypatch.context() as patch:
        for runner in runners:
            draft = runner.draft

            def counted(*given: Any, draft: Any = draft) -> Any:
                nonlocal n_calls
                found = draft(*given) if has_rounds else None
                n_calls += found is not None
                return found

            patch.setattr(runner, "draft", counted)
        patch.setattr(engine.speculator, "_control", FixedControl())
        for drafter in engine.speculator._drafters:
            if drafter.name == spec:
                make = drafter.draft

                def recorded(asks: Any, make: Any = make) -> Any:
                    found = make(asks)
                    drafts.append([each.tokens for each in found])
                    return found

                patch.setattr(drafter, "draft", recorded)
        requests = []
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(
                max_tokens=40, temperature=0.9 * (i % 2), seed=i, speculative=spec, draft_max=3 + i
            )
            requests.append(engine.add(llm.tokenizer.encode(prompt), params))
        while engine.has_work:
            engine.step()
    llm._loaded.cache.check_integrity()
    return ([request.generated for request in requests], drafts), n_calls


def _runner(drafter: Any) -> Any:
    return getattr(drafter, "runner", None) or getattr(drafter, "_runner", None)


@pytest.mark.parametrize("spec", ["draft", "exit"])
def test_native_rounds_give_the_drafts_of_single_rounds(
    llm: LLM, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, n_none = answers(llm, spec, monkeypatch, has_rounds=False)
    together, n_calls = answers(llm, spec, monkeypatch, has_rounds=True)
    assert n_none == 0
    assert n_calls > 3
    assert together == alone
    assert any(len(tokens) == 5 for drafts in together[1] for tokens in drafts)


@pytest.mark.parametrize("spec", ["draft", "exit"])
def test_a_row_without_a_token_ends_its_draft_and_changes_no_answer(
    llm: LLM, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm._loaded.engine
    drafter = next(each for each in engine.speculator._drafters if each.name == spec)
    make, lengths = drafter.draft, []
    draft = _runner(drafter).draft

    def failing(*given: Any) -> Any:
        rounds = draft(*given)
        return [*rounds[:1], [-2, *rounds[0][1:]]]  # as in `backends.cpu.sampler`

    def recorded(asks: Any) -> Any:
        found = make(asks)
        lengths.extend(len(each.tokens) for each in found)
        assert all(token >= 0 for each in found for token in each.tokens)
        return found

    def texts(speculative: str) -> list[list[int]]:
        params = SamplingParams(max_tokens=20, temperature=0, speculative=speculative, draft_max=4)
        requests = [engine.add(llm.tokenizer.encode(prompt), params) for prompt in PROMPTS]
        while engine.has_work:
            engine.step()
        return [request.generated for request in requests]

    expected = texts("off")
    monkeypatch.setattr(engine.speculator, "_control", FixedControl())
    monkeypatch.setattr(drafter, "draft", recorded)
    monkeypatch.setattr(_runner(drafter), "draft", failing)
    assert texts(spec) == expected
    assert set(lengths) - {0, 4}, "no draft was cut short"


def test_a_draft_that_ends_early_ends_no_other_draft() -> None:
    path = bundled_draft_path()  # it drafts for itself, and its drafts are right
    with LLM(path, draft_model=path, n_ctx=256, n_parallel=3, kv_block_size=8) as llm:
        engine = llm._loaded.engine
        engine.speculator._control = FixedControl()

        def serve(spec: str, stop: frozenset[int]) -> list[Any]:
            shared: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "draft_max": 9}
            requests = []
            for prompt, stops in zip(PROMPTS, (frozenset[int](), stop, frozenset[int]()), strict=True):
                params = SamplingParams(speculative=spec, stop_token_ids=stops, **shared)
                requests.append(engine.add(llm.tokenizer.encode(prompt), params))
            while engine.has_work:
                engine.step()
            return requests

        free = serve("off", frozenset())
        stop = frozenset([free[1].generated[4]])  # in the middle of its first draft
        found = serve("draft", stop)
        assert [r.generated for r in found] == [r.generated for r in serve("off", stop)]
        assert 0 < found[1].n_generated <= 4
        for request in found:
            assert request.drafts["draft"].accepted == request.drafts["draft"].drafted
        assert found[0].n_steps <= 5
        (draft,) = llm._loaded.companions
        draft._cache.check_integrity()
