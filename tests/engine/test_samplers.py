"""The samplers beyond the usual chain, against their plain formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from motley import LLM
from motley.engine import samplers
from motley.engine.params import SAMPLERS, SamplingParams
from motley.engine.samplers import ChainSampler, needs_chain_sampler
from motley.engine.sampling import Sampler, build_sampler, shortlist
from motley.errors import RequestError

rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40)
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


def descending(values: list[float]) -> np.ndarray:
    return np.array(sorted(values, reverse=True))


def probabilities(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def kept(row: np.ndarray) -> list[int]:
    return [i for i, value in enumerate(row.tolist()) if value != -math.inf]


def chain(**options: Any) -> ChainSampler:
    params = SamplingParams(**(OFF | options))
    plain = build_sampler(params)
    return ChainSampler(params, plain.chain, plain.key)


def choose(sampler: Sampler, row: list[float], history: list[int], index: int = 0) -> int:
    (found,) = shortlist(torch.tensor(row)[None], [sampler], [history])
    return sampler.pick(found, index)


@given(rows, st.floats(0.1, 4))
def test_top_n_sigma(values: list[float], n: float) -> None:
    row = descending(values)
    limit = max(values) - n * np.std(values)
    found = kept(samplers.top_n_sigma(row, n))
    assert found == [i for i, v in enumerate(row) if v >= limit] or abs(row[len(found) - 1] - limit) < 1e-9
    assert kept(samplers.top_n_sigma(row, -1.0)) == list(range(len(row)))


@given(rows, st.floats(0.01, 0.5))
def test_xtc_leaves_the_least_likely_of_the_likely(values: list[float], threshold: float) -> None:
    row = descending(values)
    above = [i for i, p in enumerate(probabilities(row)) if p >= threshold]
    expected = [i for i in range(len(row)) if i not in above[:-1]]
    assert kept(samplers.xtc(row, threshold)) == expected
    assert kept(samplers.xtc(row, 0.51)) == list(range(len(row)))


def test_xtc_happens_with_its_probability_and_the_same_for_a_seed() -> None:
    row = [5.0, 4.9, 4.8, 0.0]
    options: dict[str, Any] = {"xtc_threshold": 0.1, "temperature": 1e-3}
    always, never = chain(xtc_probability=1, **options), chain(xtc_probability=0, **options)
    half = chain(xtc_probability=0.5, **options)
    assert {choose(always, row, [], i) for i in range(50)} == {2}
    assert {choose(never, row, [], i) for i in range(50)} == {0}
    drawn = [choose(half, row, [], i) for i in range(400)]
    assert 150 < drawn.count(2) < 250
    assert drawn == [choose(half, row, [], i) for i in range(400)]


@given(rows, st.floats(0.2, 2), st.floats(0.1, 1), st.floats(0.5, 2))
def test_dynamic_temperature(values: list[float], t: float, spread: float, exponent: float) -> None:
    row = descending(values)
    found = samplers.dynamic_temperature(row, t, spread, exponent)
    if len(row) == 1:
        return
    probs = probabilities(row)
    entropy = -sum(p * math.log(p) for p in probs if p > 0) / math.log(len(row))
    low = max(0.0, t - spread)
    expected = low + (t + spread - low) * entropy**exponent
    if expected > 1e-3:
        assert np.allclose(found - found[0], (row - row[0]) / expected, rtol=1e-6, atol=1e-6)


@given(rows, st.floats(0, 12))
def test_mirostat_2_removes_what_is_too_surprising(values: list[float], mu: float) -> None:
    row = descending(values)
    surprise = -np.log2(np.maximum(probabilities(row), 1e-300))
    assert kept(samplers.mirostat_2(row, mu)) == [i for i, s in enumerate(surprise) if i == 0 or s <= mu]


@given(rows, st.floats(-1000, 1000))
def test_mirostat_1_keeps_the_best(values: list[float], mu: float) -> None:
    found = kept(samplers.mirostat_1(descending(values), mu, 1000))
    assert found == list(range(len(found)))
    assert found


def test_mirostat_1_is_the_formula_of_its_paper() -> None:
    n_vocab, s, mu = 1000, 1.3, 5.0
    zipf = np.log(np.arange(1, n_vocab + 1) ** -s)
    e = s - 1
    k = (e * 2**mu / (1 - n_vocab**-e)) ** (1 / s)
    assert len(kept(samplers.mirostat_1(zipf, mu, n_vocab))) == int(k)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_moves_towards_its_surprise(version: int) -> None:
    """And a token that is chosen again is the same: the state belongs to the index."""
    sampler = chain(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.2)
    row = (-np.log(np.arange(1, 2001))).tolist()
    first = [choose(sampler, row, [], i) for i in range(300)]
    assert [choose(sampler, row, [], i) for i in range(300)] == first
    (found,) = shortlist(torch.tensor(row)[None], [sampler], [[]])
    surprises = []
    for i, token in enumerate(first[100:], 100):
        values, ids = sampler.distribution(found, i)
        surprises.append(-math.log2(probabilities(values)[ids == token][0]))
    assert abs(np.mean(surprises) - 3.0) < 0.5


def plain_dry(history: list[int], allowed: int, breakers: set[int]) -> dict[int, int]:
    """By token: the longest end of the history that it followed before, by comparing everything."""
    longest: dict[int, int] = {}
    for at in range(1, len(history)):
        n = 0
        while n < at and history[at - 1 - n] == history[-1 - n] and history[-1 - n] not in breakers:
            n += 1
        if n >= max(1, allowed) and history[at] not in breakers:
            longest[history[at]] = max(n, longest.get(history[at], 0))
    return longest


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 4), st.sets(st.integers(0, 3), max_size=1))
def test_dry_is_its_definition(history: list[int], allowed: int, breakers: set[int]) -> None:
    found = samplers.dry_penalties(history, multiplier=0.8, base=1.75, allowed=allowed, breakers=breakers)
    expected = {t: 0.8 * 1.75 ** (n - allowed) for t, n in plain_dry(history, allowed, breakers).items()}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("multiplier", "base"), [(1.0, 1e200), (1e30, 1e300), (0.8, 50.0)])
def test_dry_costs_stay_numbers_however_long_a_repetition_is(multiplier: float, base: float) -> None:
    history = [1, 2] * 300
    costs = samplers.dry_penalties(history, multiplier=multiplier, base=base, allowed=2, breakers=set())
    assert costs == {1: 1e30}


def test_dry_ends_a_repetition_even_of_greedy_choices() -> None:
    params = SamplingParams(temperature=0, dry_multiplier=5.0)
    assert needs_chain_sampler(params)
    sampler = ChainSampler(params, (), 0)
    history = [1, 2, 3, 4, 1, 2, 3]
    assert choose(sampler, [0.0, 0, 0, 0, 3.0, 2.0], history) == 5
    assert choose(sampler, [0.0, 0, 0, 0, 3.0, 2.0], [1, 2, 3, 0, 1, 2]) == 4
    assert choose(ChainSampler(params, (), 0, frozenset({3})), [0.0, 0, 0, 0, 3.0, 2.0], history) == 4


@given(rows, st.integers(1, 50), st.floats(0.05, 0.99), st.floats(0.01, 0.5))
def test_the_usual_order_is_the_usual_sampler(values: list[float], k: int, p: float, least: float) -> None:
    assume(len(set(values)) == len(values))  # of equal logits any may be among the best k
    options: dict[str, Any] = {"top_k": k, "top_p": p, "min_p": least, "temperature": 0.7}
    usual = build_sampler(SamplingParams(**(OFF | options)))
    assert not needs_chain_sampler(usual.params)
    ours = chain(**options)
    for index in range(5):
        assert choose(ours, values, [], index) == choose(usual, values, [], index)


def test_the_order_matters_and_what_is_left_out_is_off() -> None:
    row = [3.0, 2.0, 1.0, 0.0]
    hot_first = chain(temperature=8.0, top_p=0.6, samplers=("temperature", "top_p"))
    hot_last = chain(temperature=8.0, top_p=0.6, samplers=("top_p", "temperature"))
    (found,) = shortlist(torch.tensor(row)[None], [hot_last], [[]])
    assert len(hot_last.distribution(found, 0)[1]) == 1
    assert len(hot_first.distribution(found, 0)[1]) == 3
    only = chain(temperature=8.0, top_k=1, samplers=("temperature",))
    assert len(only.distribution(found, 0)[1]) == 4
    penalized = SamplingParams(repeat_penalty=2.0, samplers=("top_k",))
    assert not penalized.has_penalties


def test_filters_see_what_xtc_has_left() -> None:
    row = [5.0, 4.9, 4.8, 0.0, -1.0]
    sampler = chain(xtc_probability=1, top_k=2, samplers=("xtc", "top_k"))
    (found,) = shortlist(torch.tensor(row)[None], [sampler], [[]])
    assert sampler.distribution(found, 0)[1].tolist() == [2, 3]


def test_filters_keep_as_many_as_asked_for() -> None:
    row = [9.0, 1.0, 0.5, 0.0]
    for options in ({"top_p": 0.1}, {"min_p": 0.9}, {"top_n_sigma": 0.1}, {"typical_p": 0.01}, {"top_k": 1}):
        sampler = chain(min_keep=3, **options)
        (found,) = shortlist(torch.tensor(row)[None], [sampler], [[]])
        assert sampler.distribution(found, 0)[1].tolist() == [0, 1, 2], options


@pytest.mark.parametrize(
    "options",
    [{"mirostat": 3}, {"xtc_probability": 2}, {"samplers": ("nonsense",)}, {"samplers": 3}, {"dry_base": -1},
     {"dry_sequence_breakers": ("",)}, {"min_keep": -1}, {"dynatemp_range": -1}, {"top_n_sigma": float("nan")}],
    ids=str,
)  # fmt: skip
def test_impossible_values_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)


def test_names_of_samplers_have_aliases() -> None:
    assert SamplingParams(samplers=["typical_p", "top_k"]).samplers == ("typ_p", "top_k")
    assert SamplingParams().samplers == SAMPLERS


@pytest.fixture(scope="module")
def llm(bundled: Path) -> LLM:
    return LLM(bundled, n_ctx=256, n_parallel=4)


@pytest.mark.parametrize(
    "options",
    [{"top_n_sigma": 1.0}, {"xtc_probability": 0.5}, {"dynatemp_range": 0.5}, {"mirostat": 1}, {"mirostat": 2},
     {"dry_multiplier": 0.8}, {"min_keep": 5}, {"samplers": ("temperature", "top_k")},
     {"mirostat": 2, "mirostat_tau": 1e6}, {"dry_multiplier": 1e300, "dry_base": 1e300}],
    ids=str,
)  # fmt: skip
def test_answers_are_the_same_for_a_seed_alone_and_in_a_batch(llm: LLM, options: dict[str, Any]) -> None:
    options = options | {"seed": 3, "max_tokens": 12}
    alone = llm.generate("Once upon a time", **options)
    mixed = [SamplingParams(**options), SamplingParams(seed=3, max_tokens=12), SamplingParams(**options)]
    together = llm.generate(["Once upon a time"] * 3, params=mixed)
    assert together[0].tokens == together[2].tokens == alone.tokens
    assert len(alone.tokens) == 12
    assert (
        llm.generate("Once upon a time", logprobs=3, post_sampling_probs=True, **options).tokens
        == alone.tokens
    )


def test_dry_breakers_are_tokens_that_contain_them(llm: LLM) -> None:
    request = llm._loaded.engine.new_request(
        [5], SamplingParams(dry_multiplier=1.0, dry_sequence_breakers="\n")
    )
    newline = llm.tokenizer.encode("\n", add_special=False)[0]
    assert newline in request.sampler.breakers
    assert llm.tokenizer.encode("a", add_special=False)[0] not in request.sampler.breakers
