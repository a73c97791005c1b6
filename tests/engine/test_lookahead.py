"""Lookahead: windows become what the model says, n-grams are found and kept, texts stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from by_hand import stepped_by_hand
from drafters import serve

from motley import LLM
from motley.engine import Request, SamplingParams
from motley.engine.drafting import Lookahead
from motley.engine.drafting.control import FixedControl
from motley.engine.drafting.draft import Ask
from motley.engine.drafting.lookahead import LookaheadSizes
from motley.engine.request import Speculation
from motley.errors import ConfigError
from random_models import GEMMA3

SPECULATION = Speculation(("lookahead",), 15)
CREWS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "tensor": {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)},
    "layer": {"devices": "cpu,cpu", "split_mode": "layer"},
    "small blocks": {"kv_block_size": 8},
    "bf16 cache": {"cache_type_k": "bf16", "cache_type_v": "f32"},
}


def new_request(*tokens: int) -> Request:
    return Request(
        prompt=tokens,
        sampler=None,
        text=None,  # type: ignore[arg-type]
        stop_ids=frozenset(),
        max_tokens=None,
        speculation=SPECULATION,
    )


def answer(request: Request, drafter: Lookahead, model: Callable[[int], int], n_tokens: int) -> int:
    """Generates by a model that knows the last token only. Returns the number of steps."""
    n_steps = 0
    while request.n_generated < n_tokens:
        (draft,) = drafter.draft([Ask(request, 15)])
        rows = [request.tokens[-1], *draft.tokens]
        outputs = [model(token) for token in rows]
        drafter.learn(request, draft.tokens, outputs)
        n_right = next(
            (i for i, (a, b) in enumerate(zip(draft.tokens, outputs, strict=False)) if a != b),
            len(draft.tokens),
        )
        new = outputs[: n_right + 1]
        request.tokens += new
        request.generated += new
        n_steps += 1
    return n_steps


def test_what_follows_what_is_learned_from_rows_that_were_wrong() -> None:
    """The text has a period of 40. After it was seen once, or guessed, every draft is right."""
    request = new_request(0)
    n_steps = answer(request, Lookahead(LookaheadSizes(7, 5, 4)), lambda token: (token + 3) % 40, 200)
    assert request.generated[:4] == [3, 6, 9, 12]
    assert n_steps < 80


def test_drafts_are_as_long_as_the_window_and_the_limit() -> None:
    drafter = Lookahead(LookaheadSizes(5, 3, 2))
    request = new_request(4, 5)
    assert len(drafter.draft([Ask(request, 15)])[0].tokens) == 5
    assert len(drafter.draft([Ask(request, 2)])[0].tokens) == 2


def test_the_pool_keeps_the_latest_ngrams_of_a_token() -> None:
    drafter = Lookahead(LookaheadSizes(3, 3, 2))
    request = new_request(1)
    for output in (7, 8, 9):
        drafter.learn(request, (), (output,))
    pool = request.memory["lookahead"].pool
    assert list(pool[1]) == [(8,), (9,)]


@pytest.mark.parametrize("crew", CREWS)
def test_texts_are_the_same(bundled: Path, crew: str) -> None:
    options: dict[str, Any] = {"n_ctx": 128, "n_batch": 32, "n_parallel": 3, "lookahead": "5,4,3"}
    with LLM(bundled, **(options | CREWS[crew])) as llm, stepped_by_hand(llm):
        engine = llm._loaded.engine
        engine.speculator._control = FixedControl()
        prompts = [llm.tokenizer.encode(t) for t in ("Once upon a time", "1 2 3 1 2 3 1 2", "The dog. " * 8)]
        answers = []
        for spec in ("off", "lookahead"):
            shared: dict[str, Any] = {"max_tokens": 28, "ignore_eos": True, "speculative": spec}
            params = [
                SamplingParams(temperature=0, **shared),
                SamplingParams(temperature=0, **shared),
                SamplingParams(seed=3, **shared),
            ]
            answers.append(serve(engine, prompts, params))
        without, found = answers
        assert [r.generated for r in found] == [r.generated for r in without]
        assert sum(r.drafts["lookahead"].accepted for r in found) > 0
        assert sum(r.n_steps for r in found) < sum(r.n_steps for r in without)


def test_texts_with_windows_and_shifts_are_the_same(tmp_path: Path) -> None:
    path = GEMMA3.write(tmp_path / "gemma3.gguf", is_q8_0=True)
    with LLM(path, n_ctx=64, n_parallel=2) as llm, stepped_by_hand(llm):
        engine = llm._loaded.engine
        engine.speculator._control = FixedControl()
        answers = []
        for spec in ("off", "lookahead"):
            shift: dict[str, Any] = {"context_shift": True, "n_keep": 2, "ignore_eos": True}
            params = [
                SamplingParams(temperature=0, max_tokens=90, speculative=spec, **shift),
                SamplingParams(seed=2, max_tokens=90, speculative=spec, **shift),
            ]
            answers.append([r.generated for r in serve(engine, [[3, 4, 5], [9] * 20], params)])
        assert answers[0] == answers[1]


@pytest.mark.parametrize("sizes", ["7", "7,5", "0,5,7", "7,1,7", "7,5,0", "64,5,7", "a,b,c", "7,5,7,9", ""])
def test_sizes_that_cannot_be_are_refused(bundled: Path, sizes: str) -> None:
    with pytest.raises(ConfigError, match="is not W,N,G"):
        LLM(bundled, lookahead=sizes)


def test_sizes_must_be_text(bundled: Path) -> None:
    with pytest.raises(ConfigError, match="it must be text"):
        LLM(bundled, lookahead=7)  # type: ignore[arg-type]
