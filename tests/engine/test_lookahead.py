"""Lookahead: windows become what the model says, n-grams are found and kept, texts stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from by_hand import stepped_by_hand
from drafters import serve

from motley import LLM
from motley.backends import ReferenceBackend
from motley.engine import Request, SamplingParams
from motley.engine.drafting import ChainLookahead, Draft, Lookahead
from motley.engine.drafting.control import FixedControl
from motley.engine.drafting.draft import DraftRequest
from motley.engine.drafting.lookahead import LookaheadSizes
from motley.engine.request import Speculation
from motley.engine.trees import depths
from motley.errors import ConfigError
from motley.runtime import Runner
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


def answer(
    request: Request, drafter: Lookahead | ChainLookahead, model: Callable[[int], int], n_tokens: int
) -> int:
    """Generates by a model that knows the last token only. Returns the number of steps."""
    n_steps = 0
    while request.n_generated < n_tokens:
        (draft,) = drafter.draft([DraftRequest(request, 15)])
        outputs = [model(token) for token in (request.tokens[-1], *draft.tokens)]
        drafter.learn(request, draft, outputs)
        right = [model(request.tokens[-1])]
        while len(right) < 16:
            right.append(model(right[-1]))
        n_right, _ = draft.n_right(right)
        request.tokens += right[: n_right + 1]
        request.generated += right[: n_right + 1]
        n_steps += 1
    return n_steps


@pytest.mark.parametrize(("form", "max_steps"), [(ChainLookahead, 80), (Lookahead, 80)])
def test_what_follows_what_is_learned_from_rows_that_were_wrong(
    form: type[Lookahead | ChainLookahead], max_steps: int
) -> None:
    """The text has a period of 40. After it was seen once, or guessed, every draft is right."""
    request = new_request(0)
    n_steps = answer(request, form(LookaheadSizes(7, 5, 4)), lambda token: (token + 3) % 40, 200)
    assert request.generated[:4] == [3, 6, 9, 12]
    assert n_steps < max_steps


def test_chains_are_as_long_as_the_window_and_the_limit() -> None:
    drafter = ChainLookahead(LookaheadSizes(5, 3, 2))
    request = new_request(4, 5)
    assert len(drafter.draft([DraftRequest(request, 15)])[0].tokens) == 5
    assert len(drafter.draft([DraftRequest(request, 2)])[0].tokens) == 2


def test_the_pool_of_chains_keeps_the_latest_ngrams_of_a_token() -> None:
    drafter = ChainLookahead(LookaheadSizes(3, 3, 2))
    request = new_request(1)
    for output in (7, 8, 9):
        drafter.learn(request, Draft((), "lookahead"), (output,))
    pool = request.memory["lookahead"].pool
    assert list(pool[1]) == [(8,), (9,)]


def test_the_window_has_a_column_for_each_position_and_a_level_for_each_step() -> None:
    """W = 3, N = 4: three levels of three guesses, the first of which is the last token."""
    drafter, request = Lookahead(LookaheadSizes(3, 4, 2)), new_request(1, 2, 3)
    (draft,) = drafter.draft([DraftRequest(request, 15)])
    #                       (1,0) (2,0) (0,1) (1,1) (2,1) (0,2) (1,2) (2,2)
    assert draft.parents == (-1, 0, -1, 2, 3, 2, 5, 6)
    assert max(depths(draft.parents)) == 4
    assert draft.grade == 0  # no n-gram is known
    outputs = list(range(100, 109))
    drafter.learn(request, draft, outputs)
    known = request.memory["lookahead"]
    t = draft.tokens
    assert known.pool == {
        3: {(t[0], t[1], 102): None},
        t[2]: {(t[3], t[4], 105): None},
        t[5]: {(t[6], t[7], 108): None},
    } or t[2] in (3, t[5])
    assert known.levels[-1] == {2: 102, 3: 105, 4: 108}
    assert len(known.levels) == 3
    request.tokens.append(9)
    request.generated.append(9)
    (after,) = drafter.draft([DraftRequest(request, 15)])
    assert after.tokens[1] == 102  # column 0, the latest level
    assert after.tokens[4] == 105


def test_candidates_are_a_trie_of_the_latest_ngrams() -> None:
    drafter = Lookahead(LookaheadSizes(1, 3, 2))
    request = new_request(5, 1, 1, 5, 2, 2, 5, 3, 3, 5, 3, 4, 5)
    (draft,) = drafter.draft([DraftRequest(request, 15)])
    assert draft.tokens[:3] == (3, 4, 3)
    assert draft.parents[:3] == (-1, 0, 0)
    assert draft.grade == 1


@pytest.mark.parametrize("sizes", [(63, 16, 64), (63, 2, 64), (1, 16, 1), (7, 5, 7), (2, 2, 1)])
@pytest.mark.parametrize(("n_max", "max_rows"), [(15, 63), (1, 63), (3, 5), (15, 1), (63, 20)])
def test_trees_keep_to_their_limits(sizes: tuple[int, int, int], n_max: int, max_rows: int) -> None:
    drafter, request = Lookahead(LookaheadSizes(*sizes)), new_request(*range(9), *range(7))
    for step in range(12):
        (draft,) = drafter.draft([DraftRequest(request, n_max, max_rows)])
        assert len(draft.tokens) == len(draft.parents) <= max_rows
        assert max(depths(draft.parents), default=0) <= n_max
        drafter.learn(request, draft, [(step * 5 + i) % 9 for i in range(len(draft.tokens) + 1)])
        new = [(step + i) % 8 for i in range(1 + step % 3)]
        request.tokens += new
        request.generated += new


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


@pytest.mark.parametrize("why", ["no masks over the rows", "recurrent state"])
def test_drafts_are_chains_where_there_are_no_trees(
    bundled: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "recurrent state":
        monkeypatch.setattr(Runner, "refuses_trees", "the model has layers with a recurrent state")
    else:
        monkeypatch.setattr(ReferenceBackend, "has_trees", False)
    with LLM(bundled, n_ctx=64, backend="reference", spec="lookahead") as llm, stepped_by_hand(llm):
        assert any("drafts of lookahead are chains" in notice and why in notice for notice in llm.notices)
        engine = llm._loaded.engine
        engine.speculator._control = FixedControl()
        trees = []
        monkeypatch.setattr(engine.cache, "move", lambda *_: trees.append(1))
        params = [
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, speculative=spec)
            for spec in ("off", "lookahead")
        ]
        without, found = serve(engine, [[5, 6, 7, 5, 6, 7]] * 2, params)
        assert found.generated == without.generated
        assert found.drafts["lookahead"].drafted > 0
        assert not trees


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
