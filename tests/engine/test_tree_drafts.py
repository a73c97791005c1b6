"""Drafts that are trees: alternatives are checked in one step, and texts stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from by_hand import stepped_by_hand
from drafters import TREES, Guess, bushy, give, right, right_last, scattered, serve
from faults import Faults
from test_speculation import is_tie

from motley import LLM
from motley.backends.cpu import is_available
from motley.bundled import bundled_draft_path
from motley.engine import SamplingParams
from motley.engine.drafting import Draft
from motley.engine.trees import ROOT, cut, depths, path_to, row_masks
from random_models import GEMMA3

if not is_available():
    pytest.skip("the native module is not built", allow_module_level=True)

PROMPTS = [list(range(3, 40)), [5, 9, 9, 7], list(range(60, 3, -2)), [200, 100]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, repeat_penalty=1.3),
    SamplingParams(seed=2, max_tokens=24, temperature=1.2, top_k=0, top_p=0.9, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=3, ignore_eos=True),
]
CASES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "tensor": {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)},
    "layer": {"devices": "cpu,cpu", "split_mode": "layer"},
    "blocks of 1": {"kv_block_size": 1},
    "blocks of 4": {"kv_block_size": 4},
    "blocks of 64": {"kv_block_size": 64},
    "f32": {"cache_type_k": "f32", "cache_type_v": "f32"},
    "q8_0": {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    "q5_1 and q4_0": {"cache_type_k": "q5_1", "cache_type_v": "q4_0"},
    "no prefix cache": {"prefix_cache": False},
    "preempted": {"kv_cache_tokens": 96},
    "demand-paged": {"kv_cache_tokens": 128, "kv_cache_demand_paged": True},
    "small batches": {"n_batch": 9},
    "reference": {"backend": "reference"},
}
ROUNDED = ("reference",)  # other numbers of rows may be rounded differently


@contextmanager
def load(path: Path, **options: Any) -> Iterator[LLM]:
    defaults = {"n_ctx": 160, "n_batch": 128, "n_parallel": 4, "kv_block_size": 16}
    with LLM(path, **(defaults | options)) as llm, stepped_by_hand(llm):
        yield llm


def answers(
    llm: LLM,
    params: Sequence[SamplingParams],
    guess: Guess,
    known: Sequence[tuple[int, ...]] = (),
    seed: int = 0,
) -> tuple[list[tuple[int, ...]], list[int]]:
    """The tokens of all answers, and how many drafted tokens were right in each draft."""
    drafter = give(llm, guess, seed=seed)
    drafter.answers |= dict(zip(map(tuple, PROMPTS), known, strict=False))
    requests = serve(llm._loaded.engine, PROMPTS, params)
    return [tuple(request.generated) for request in requests], drafter.n_accepted


@pytest.mark.parametrize("case", CASES)
def test_texts_are_the_same(case: str) -> None:
    with load(bundled_draft_path(), **CASES[case]) as llm:
        without, _ = answers(llm, PARAMS, right)
        lengths: set[int] = set()
        for seed, guess in enumerate((*TREES, scattered, scattered)):
            found, counts = answers(llm, PARAMS, guess, without, seed)
            for prompt, params, mine, theirs in zip(PROMPTS, PARAMS, found, without, strict=True):
                is_close = case in ROUNDED and mine != theirs and is_tie(llm, prompt, params, mine, theirs)
                assert mine == theirs or is_close, guess.__name__
            lengths |= set(counts)
        assert lengths == set(range(8)) if case != "small batches" else {0, 1} <= lengths
        # What was moved and published is right for requests that begin with it.
        longer = [[*prompt, *answer[:-1]] for prompt, answer in zip(PROMPTS, without, strict=True)]
        last = [SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)] * 4
        (end,) = serve(llm._loaded.engine, longer[:1], last[:1])
        assert end.generated == [without[0][-1]] or case in ROUNDED


@pytest.mark.parametrize("block_size", [4, 16])
def test_texts_with_sliding_windows_and_shifts_are_the_same(tmp_path: Path, block_size: int) -> None:
    path = GEMMA3.write(tmp_path / "gemma3.gguf", is_q8_0=True)
    shift: dict[str, Any] = {"ignore_eos": True, "context_shift": True, "n_keep": 2}
    params = [
        SamplingParams(temperature=0, max_tokens=90, **shift),
        SamplingParams(seed=5, max_tokens=90, **shift),
    ]
    with load(path, n_ctx=64, kv_block_size=block_size) as llm:
        prompts = [PROMPTS[1], PROMPTS[3]]
        give(llm, right)
        without = [tuple(r.generated) for r in serve(llm._loaded.engine, prompts, params)]
        for guess in (right_last, scattered, bushy):
            drafter = give(llm, guess, draft_max=12)
            drafter.answers |= dict(zip(map(tuple, prompts), without, strict=True))
            found = [tuple(r.generated) for r in serve(llm._loaded.engine, prompts, params)]
            assert found == without, guess.__name__
            assert max(drafter.n_accepted) > 4


def test_trees_of_rows_chosen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where each choice is a launch."""
    monkeypatch.setattr("motley.engine.verifying._is_on_gpu", lambda _logits: True)
    with load(bundled_draft_path()) as llm:
        without, _ = answers(llm, PARAMS, right)
        for guess in TREES:
            assert answers(llm, PARAMS, guess, without)[0] == without


def test_branches_that_are_not_taken_leave_the_state_of_a_sampler_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU. Mirostat's threshold after an index is that of the token that was taken there."""
    monkeypatch.setattr("motley.engine.verifying._is_on_gpu", lambda _logits: True)
    params = [
        SamplingParams(
            seed=i,
            temperature=1.3,
            max_tokens=24,
            mirostat=2,
            mirostat_tau=2,
            mirostat_eta=0.9,
            ignore_eos=True,
        )
        for i in range(4)
    ]
    with load(bundled_draft_path()) as llm:
        without, _ = answers(llm, params, right)
        for guess in TREES:
            assert answers(llm, params, guess, without)[0] == without


@pytest.mark.parametrize("where", ["shift", "commit"])
def test_a_failure_while_rows_are_moved_leaves_the_texts_as_they_are(where: str) -> None:
    with load(bundled_draft_path()) as llm:
        engine = llm._loaded.engine
        short = [replace(each, max_tokens=9) for each in PARAMS]
        without, _ = answers(llm, short, right)
        places = {"shift": (engine.runner, "shift"), "commit": (engine.cache, "commit")}
        faults = Faults(where, [places[where]])
        for n in range(1, 100):
            drafter = give(llm, right_last)
            drafter.answers |= dict(zip(map(tuple, PROMPTS), without, strict=True))
            with faults.armed(n, MemoryError):
                requests = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, short, strict=True)]
                while engine.has_work:
                    engine.step()
                    engine.cache.check_integrity()
            assert [tuple(request.generated) for request in requests] == without
            if n > faults.n_calls:
                break
            assert any(request.n_retries for request in requests)
        assert n > 3


def test_stops_inside_a_tree_end_the_answer_at_the_same_token(bundled: Path) -> None:
    with load(bundled) as llm:
        prompt = llm.tokenizer.encode("Once upon a time there was a little dog.")
        variants: list[dict[str, Any]] = [{"max_tokens": 13}, {"stop_token_ids": frozenset()}]
        give(llm, right)
        whole = serve(
            llm._loaded.engine, [prompt], [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)]
        )[0]
        words = whole.text.all.split()
        variants += [
            {"stop": (" ".join(words[4:6]),)},
            {"stop_token_ids": frozenset([whole.generated[11]])},
        ]
        for options in variants:
            params = SamplingParams(**({"temperature": 0, "max_tokens": 40, "ignore_eos": True} | options))
            outcomes = []
            for guess in (None, *TREES):
                drafter = give(llm, guess or right, draft_max=9)
                if guess is not None:
                    drafter.answers[tuple(prompt)] = tuple(whole.generated)
                request = serve(llm._loaded.engine, [prompt], [params])[0]
                outcomes.append((request.generated, request.text.all, request.finish_reason))
            assert all(each == outcomes[0] for each in outcomes)


def test_masks_are_those_of_paths() -> None:
    parents = (-1, 0, -1, 2, 2, 1)
    assert depths(parents) == [1, 2, 1, 2, 2, 3]
    masks = row_masks(parents)
    for i in range(ROOT, len(parents)):
        assert masks[i + 1] == 1 + sum(2 << place for place in path_to(parents, i))
    assert row_masks((-1, -1), n_pending=3) == (1, 3, 7, 0b1111, 0b10111)
    assert row_masks(range(-1, 62))[-1] == 2**64 - 1


def test_a_tree_that_is_cut_is_a_tree() -> None:
    tokens, parents = (10, 11, 12, 13, 14), (-1, 0, -1, 1, 2)
    assert cut(tokens, parents, 3, 9) == ((10, 11, 12), (-1, 0, -1))
    assert cut(tokens, parents, 2, 9) == ((10, 11), ())  # a chain
    assert cut(tokens, parents, 9, 1) == ((10, 12), (-1, -1))
    assert cut(tokens, (), 3, 2) == ((10, 11), ())


def test_a_tree_knows_how_much_of_it_came() -> None:
    draft = Draft((10, 11, 10, 13, 14), "lookup", 0, (-1, 0, -1, 1, 1))
    assert draft.n_right([10, 11, 14]) == (3, False)
    assert draft.n_right([10, 11, 14, 9]) == (3, False)  # nothing was drafted there
    assert draft.n_right([10, 11, 9]) == (2, True)
    assert draft.n_right([9]) == (0, True)
    assert draft.n_right([]) == (0, False)
