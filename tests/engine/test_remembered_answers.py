"""Lookup drafts from finished answers of the same user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motley import LLM
from motley.bundled import bundled_draft_path
from motley.engine.drafting.control import FixedControl
from motley.engine.drafting.lookup import RememberedAnswers
from motley.engine.request import Request

PROMPT = "Once upon a time there was a little dog."
OPTIONS: dict[str, Any] = {"seed": 3, "temperature": 1.0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def path() -> Path:
    return bundled_draft_path()


def load(path: Path, **options: Any) -> LLM:
    llm = LLM(path, n_ctx=96, n_parallel=2, n_batch=64, devices="cpu", **options)
    llm._loaded.engine.speculator._control = FixedControl()  # all drafts are computed
    return llm


def test_the_answers_of_the_same_user_are_looked_up(path: Path) -> None:
    with load(path, spec="lookup", lookup_answers=64) as llm:
        first = llm.generate(PROMPT, cache_salt="ada", **OPTIONS)
        again = llm.generate(PROMPT, cache_salt="ada", **OPTIONS)
        other = llm.generate(PROMPT, cache_salt="bob", **OPTIONS)
        none = llm.generate(PROMPT, **OPTIONS)
        assert first.tokens == again.tokens == other.tokens == none.tokens
        assert again.timings.n_steps < first.timings.n_steps / 3
        assert other.timings.n_steps == none.timings.n_steps == first.timings.n_steps


def test_by_default_no_answer_is_remembered(path: Path) -> None:
    with load(path, spec="lookup") as llm:
        steps = [llm.generate(PROMPT, **OPTIONS).timings.n_steps for _ in range(3)]
        assert len(set(steps)) == 1


def finished(answers: RememberedAnswers, user: str | None, tokens: list[int], reason: str = "stop") -> None:
    request = new(user)
    answers.of(request)
    request.generated += tokens
    request.finish_reason = reason


def new(user: str | None) -> Request:
    return Request(
        prompt=(1,),
        sampler=None,
        text=None,  # type: ignore[arg-type]
        stop_ids=frozenset(),
        max_tokens=None,
        cache_salt=user,
    )


def test_the_latest_tokens_of_each_user_are_kept() -> None:
    answers = RememberedAnswers(5)
    finished(answers, "ada", [1, 2, 3])
    finished(answers, None, [9, 9])
    finished(answers, "ada", [4, 5, 6, 7])
    finished(answers, "ada", [8], "cancelled")
    finished(answers, "ada", [8], "failed")
    assert answers.of(new("ada")) == [3, 4, 5, 6, 7]
    assert answers.of(new(None)) == [9, 9]
    assert answers.of(new("bob")) == []
    for number in range(300):
        finished(answers, str(number), [number])
    assert answers.of(new("ada")) == []
    assert answers.of(new("299")) == [299]
    assert len(answers._answers) == 256
