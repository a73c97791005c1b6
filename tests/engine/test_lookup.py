"""The lookup drafter: what followed the same tokens before."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley import LLM
from motley.backends import look_up, new_text_index
from motley.bundled import bundled_draft_path
from motley.engine import SamplingParams
from motley.engine.drafting.lookup import Lookup, TextIndex
from motley.engine.request import Speculation


class FakeRequest(SimpleNamespace):
    __hash__ = object.__hash__


def index_of(prompt: list[int], generated: list[int] | None = None) -> TextIndex:
    index = TextIndex(prompt)
    index.extend(generated or [])
    return index


def test_the_draft_is_what_followed_the_same_three_tokens() -> None:
    assert index_of([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]).continuation(3) == ((4, 5, 6), 3)


def test_tokens_that_have_not_occurred_before_have_no_continuation() -> None:
    assert index_of([1, 2, 3, 4, 5, 6]).continuation(4) == ((), 0)
    assert index_of([1, 2]).continuation(4) == ((), 0)
    assert index_of([]).continuation(4) == ((), 0)


def test_the_longest_match_wins() -> None:
    text = [7, 8, 1, 2, 3, 40, 0, 0, 9, 8, 1, 2, 3, 50, 0, 0, 7, 8, 1, 2, 3]
    assert index_of(text).continuation(1) == ((40,), 5)


def test_of_equal_matches_the_most_frequent_continuation_wins() -> None:
    text: list[int] = []
    for separator, follower in ((100, 4), (101, 4), (102, 5)):
        text += [separator, 1, 2, 3, follower]
    assert index_of([*text, 103, 1, 2, 3]).continuation(1)[0] == (4,)


def test_a_repetition_continues_across_the_end_of_the_text() -> None:
    assert index_of([1, 2, 3, 1, 2, 3]).continuation(7)[0] == (1, 2, 3, 1, 2, 3, 1)
    assert index_of([5, 5, 5, 5]).continuation(4)[0] == (5, 5, 5, 5)


@pytest.mark.parametrize("is_native", [False, True])
def test_a_long_text_is_indexed_in_portions(is_native: bool) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(10**6) for _ in range(5_000)]
    text = prompt + prompt[4_000:4_003]
    index = new_text_index(text) if is_native else TextIndex(text)
    n_steps, found = 0, []
    while not found:
        if is_native:
            found = [tuple(tokens) for _, tokens, _ in look_up([index], [[]], 2)]
        else:
            index.extend([])
            found = [tokens for tokens, _ in [index.continuation(2)] if tokens]
        n_steps += 1
    assert n_steps == 8  # 512 tokens each
    assert found == [tuple(prompt[4_003:4_005])]
    assert index.n_left == 5_003 - 3 - 8 * 512


def test_a_text_that_is_not_indexed_yet_is_looked_up_in_each_step() -> None:
    lookup, rng = Lookup(), random.Random(0)
    text = [rng.randrange(10**6) for _ in range(20 * 512)]
    index = new_text_index([*text, *text[-100:-97]])
    request: Any = FakeRequest(
        memory={Lookup.name: index},
        speculation=Speculation(("lookup",), draft_max=2),
        generated=[],
        max_draft=2,
    )
    for _ in range(19):
        assert not lookup.find([request])
        assert lookup.n_pause == 0
    (draft,) = (lookup.find([request]) or {}).values()
    assert draft.tokens == tuple(text[-97:-95])


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(1, 20), st.data())
def test_a_draft_is_a_copy_of_the_text_after_the_longest_match(
    text: list[int], n_max: int, data: st.DataObject
) -> None:
    n_prompt = data.draw(st.integers(0, len(text)))
    index = TextIndex(text[:n_prompt])
    for n in range(len(text) - n_prompt + 1):
        index.extend(text[n_prompt : n_prompt + n])
    tokens, n_match = index.continuation(n_max)
    places = [p for p in range(3, len(text)) if text[p - 3 : p] == text[-3:]]
    assert bool(tokens) == bool(places)
    if tokens:
        assert len(tokens) == n_max
        whole = text + list(tokens)
        # The copy starts at a place where the last n_match tokens occurred, and may run into itself.
        assert any(
            text[p - n_match : p] == text[len(text) - n_match :]
            and all(whole[p + i] == token for i, token in enumerate(tokens))
            for p in places
            if p >= n_match
        )


@given(st.lists(st.integers(0, 3), max_size=120), st.integers(1, 20), st.data())
def test_the_native_index_finds_what_the_specification_finds(
    text: list[int], n_max: int, data: st.DataObject
) -> None:
    n_prompt = data.draw(st.integers(0, len(text)))
    index, native = TextIndex(text[:n_prompt]), new_text_index(text[:n_prompt])
    assert native is not None
    answer: list[int] = []
    for token in [None, *text[n_prompt:]]:
        answer += [] if token is None else [token]
        index.extend(answer)
        expected, n_match = index.continuation(n_max)
        found = look_up([native], [answer], n_max)
        assert found == ([(0, list(expected), n_match)] if expected else [])


def test_many_texts_are_looked_up_at_once_and_grow_by_several_tokens() -> None:
    rng = random.Random(1)
    texts = [[rng.randrange(40) for _ in range(5_000)] for _ in range(4)]
    natives = [new_text_index(text[:1000]) for text in texts]
    for n in (0, 1, 2, 900, 1900, 2900):
        found = look_up(natives, [text[1000 : 1000 + n] for text in texts], 8)
        expected = []
        for row, text in enumerate(texts):
            index = TextIndex(text[: 1000 + n])
            index.index(index.n_left)
            tokens, n_match = index.continuation(8)
            expected += [(row, list(tokens), n_match)] if tokens else []
        assert found == expected


@pytest.mark.parametrize("n_kinds", [3, 20, 1000])
@pytest.mark.parametrize("n_prompt", [0, 30, 126])
def test_an_index_that_grows_finds_what_the_specification_finds(n_prompt: int, n_kinds: int) -> None:
    """Its table is replaced by larger ones, into which entries are moved while the text is looked up."""
    rng = random.Random(n_kinds)
    text = [rng.randrange(n_kinds) for _ in range(n_prompt + 3000)]
    text[2000:] = text[500 : 500 + len(text) - 2000]
    native, index, answer = new_text_index(text[:n_prompt]), TextIndex(text[:n_prompt]), []
    for token in text[n_prompt:]:
        answer.append(token)
        index.extend(answer)
        tokens, n_match = index.continuation(3)
        assert look_up([native], [answer], 3) == ([(0, list(tokens), n_match)] if tokens else [])


def test_texts_are_looked_up_less_often_while_no_draft_is_used_and_at_once_again_after_one() -> None:
    lookup, text = Lookup(), [1, 2, 3, 4, 5, 1, 2, 3]
    request: Any = FakeRequest(
        memory={Lookup.name: new_text_index(text)},
        speculation=Speculation(("lookup",), draft_max=4),
        generated=[],
        max_draft=4,
    )

    def n_found(n_steps: int) -> int:
        return sum(bool(lookup.find([request])) for _ in range(n_steps))

    assert n_found(3) == 3
    assert n_found(8) == 4
    assert n_found(20) == 6
    n_found(8)
    assert n_found(40) == 5
    lookup.note_use()
    assert n_found(3) == 3


def test_a_prompt_is_indexed_when_its_request_is_made() -> None:
    """In the caller's thread: the engine's steps do not wait for it."""
    prompt = [5, 9, 7, 11, 12, 13] * 9
    with LLM(bundled_draft_path(), n_ctx=96, spec="auto") as llm:
        engine = llm._loaded.engine
        index = engine.new_request(prompt, SamplingParams()).memory[Lookup.name]
        assert index.n_left == 0
        assert look_up([index], [[]], 3) == [(0, [5, 9, 7], 32)]
        assert Lookup.name not in engine.new_request(prompt, SamplingParams(speculative="off")).memory
    with LLM(bundled_draft_path(), n_ctx=96, spec="auto", lookup_answers=64) as llm:  # these come first
        engine = llm._loaded.engine
        assert Lookup.name not in engine.new_request(prompt, SamplingParams()).memory
