"""Sampling: every step against a naive reference in float64, and the composition of them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from draws import follow
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from motley.engine import sampling
from motley.engine.sampling import SamplingParams, build_sampler
from motley.errors import RequestError

logit = st.floats(-20, 20, width=32)
rows = st.lists(logit, min_size=1, max_size=40)
share = st.floats(0.01, 0.99)


def descending(values: list[float]) -> np.ndarray:
    return np.array(sorted(values, reverse=True))


def probabilities(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def sample(params: SamplingParams, row: torch.Tensor, history: list[int]) -> int:
    return choose(build_sampler(params), row, history)


def choose(sampler: sampling.Sampler, row: torch.Tensor, history: list[int], index: int = 0) -> int:
    """As the engine does for one request, whose answer has `index` tokens."""
    (found,) = sampling.shortlist(row[None], [sampler], [history])
    return sampler.pick(found, index)


def kept(row: np.ndarray) -> set[int]:
    return {i for i, value in enumerate(row.tolist()) if value != -math.inf}


def everything(**changes: Any) -> SamplingParams:
    """Every filter and penalty off, except for `changes`."""
    off: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    return SamplingParams(**(off | changes))


# --- each step against its definition -----------------------------------------------------------------------


@given(rows, st.integers(0, 50))
def test_candidates_are_the_k_largest_in_descending_order(values: list[float], k: int) -> None:
    row = torch.tensor(values)
    ((top, ids),) = sampling.candidates(row[None], k)
    assert top.tolist() == sorted(row.tolist(), reverse=True)[: k or None]
    assert row[ids].tolist() == top.tolist()
    assert len(set(ids.tolist())) == len(ids) >= 1


@given(
    n=st.integers(256, 20_000),
    k=st.integers(1, 70),
    n_values=st.sampled_from([1, 3, 50, 100_000]),  # few: many logits are equal
    seed=st.integers(0, 2**16),
)
@settings(deadline=None)
def test_the_first_of_equal_logits_in_a_vocabulary_come_first(
    n: int, k: int, n_values: int, seed: int
) -> None:
    k = min(k, n // 256)
    row = torch.from_numpy(np.random.default_rng(seed).integers(n_values, size=n).astype(np.float32))
    ((top, ids),) = sampling.candidates(row[None], k)
    expected = np.argsort(-row.numpy(), kind="stable")[:k].tolist()
    assert ids.tolist() == expected
    assert top.tolist() == row[expected].tolist()


@pytest.mark.parametrize("k", [1, 2, 40])
@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_damage_is_the_best_of_a_vocabulary(k: int, damage: float) -> None:
    row = torch.zeros(32_000)
    row[12_345] = damage
    ((top, ids),) = sampling.candidates(row[None], k)
    assert ids[0] == 12_345
    assert not math.isfinite(top[0])


def test_minus_infinity_is_a_logit_like_others() -> None:
    row = torch.full((32_000,), -math.inf)
    row[[7, 31_999]] = torch.tensor([1.0, 2.0])
    ((top, ids),) = sampling.candidates(row[None], 40)
    assert ids[:2].tolist() == [31_999, 7]
    assert top.tolist() == [2.0, 1.0] + [-math.inf] * 38


@given(rows, share)
def test_top_p_keeps_the_fewest_candidates_that_reach_p(values: list[float], p: float) -> None:
    row = descending(values)
    mass = 0.0
    expected = set()
    for index, prob in enumerate(probabilities(row)):
        assume(abs(mass - p) > 1e-5)  # float32 may fall on either side of the edge
        if mass >= p:
            break
        expected.add(index)
        mass += prob
    assert kept(sampling.top_p(row, p)) == expected


@given(rows, share)
def test_min_p_keeps_what_is_at_least_p_times_as_likely_as_the_best(values: list[float], p: float) -> None:
    row = descending(values)
    probs = probabilities(row)
    assume(not np.any(np.abs(probs / probs[0] - p) < 1e-5))
    assert kept(sampling.min_p(row, p)) == set(np.flatnonzero(probs >= p * probs[0]))


@given(rows, share)
def test_typical_p_keeps_what_surprises_most_like_the_average(values: list[float], p: float) -> None:
    row = descending(values)
    probs = probabilities(row)
    distance = np.abs(-np.log(probs) - -(probs * np.log(probs)).sum())
    order = np.argsort(distance, kind="stable")
    mass = np.cumsum(probs[order])
    assume(not np.any(np.abs(mass - p) < 1e-5))
    n_kept = min(int(np.sum(mass < p)) + 1, len(order))
    edge = distance[order[n_kept - 1]]
    # Candidates as far away as the last one are kept or not together; float32 cannot tell near ties apart.
    assume(not np.any(np.abs(distance[order[n_kept:]] - edge) < 1e-4))
    assert kept(sampling.typical_p(row, p)) == set(order[:n_kept])


@given(rows, st.lists(st.integers(0, 39), max_size=30), st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties_follow_their_formula(
    values: list[float], recent: list[int], repeat: float, frequency: float, presence: float
) -> None:
    recent = [token % len(values) for token in recent]
    row = torch.tensor(values)
    expected = row.double().numpy().copy()
    for token, count in Counter(recent).items():
        expected[token] *= repeat if expected[token] <= 0 else 1 / repeat
        expected[token] -= count * frequency + presence
    result = sampling.penalize(row, recent, repeat=repeat, frequency=frequency, presence=presence)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert row.tolist() == torch.tensor(values).tolist()  # the input is left alone


@given(rows, st.floats(0.1, 5))
def test_temperature_raises_probabilities_to_a_power(values: list[float], t: float) -> None:
    row = descending(values)
    scaled = probabilities(sampling.temperature(row, t))
    expected = probabilities(row / t)
    np.testing.assert_allclose(scaled, expected, rtol=1e-3, atol=1e-6)


def test_a_temperature_near_zero_neither_overflows_nor_loses_the_best() -> None:
    scaled = sampling.temperature(np.array([300.0, 299.0, -5.0]), 1e-320)
    assert sampling.draw(scaled, np.array([0.0, 40.0, 40.0])) == 0


def test_bias_is_added_by_token_id() -> None:
    row = torch.tensor([1.0, 2.0, 3.0])
    assert sampling.add_bias(row, {0: 0.5, 2: -math.inf}).tolist() == [1.5, 2.0, -math.inf]
    assert row.tolist() == [1.0, 2.0, 3.0]


def test_draw_never_returns_a_removed_candidate() -> None:
    row, noise = np.array([-math.inf, 0.0, -math.inf, 0.0]), np.array([99.0, 1.0, 99.0, 2.0])
    assert sampling.draw(row, noise) == 3


@given(rows, st.sampled_from([0.0, 1e-30, 0.5, 1.0]))
def test_every_filter_keeps_at_least_one(values: list[float], p: float) -> None:
    row = descending(values)
    filters = (sampling.typical_p, sampling.top_p, sampling.min_p)
    for keep in filters:
        row = keep(row, p)
        assert kept(row)


# --- the composition ----------------------------------------------------------------------------------------


@given(rows)
def test_temperature_zero_takes_the_best_whatever_the_filters(values: list[float]) -> None:
    row = torch.tensor(values)
    params = SamplingParams(temperature=0, top_k=3, top_p=0.1, typical_p=0.2)
    assert sample(params, row, []) == int(row.argmax())


@given(rows, st.integers(0, 2**64 - 1))
def test_top_k_one_is_greedy(values: list[float], seed: int) -> None:
    row = torch.tensor(values)
    assert row[sample(everything(top_k=1, seed=seed), row, [])] == row.max()


@pytest.mark.parametrize(("changes", "is_right"), [({}, True), ({"temperature": 1.15}, False)])
def test_draws_follow_the_distribution(changes: dict[str, Any], is_right: bool) -> None:
    """And a wrong one is found out."""
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    sampler = build_sampler(everything(seed=7) if is_right else everything(seed=7, **changes))
    drawn = [choose(sampler, probs.log(), [], index) for index in range(4000)]
    assert follow(drawn, probs.double().numpy()) == is_right


def test_a_seed_repeats_and_another_differs() -> None:
    row = torch.zeros(1000)

    def tokens(seed: int) -> list[int]:
        sampler = build_sampler(everything(seed=seed))
        return [choose(sampler, row, [], index) for index in range(8)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_without_a_seed_each_request_has_its_own_numbers() -> None:
    assert len({build_sampler(SamplingParams()).key for _ in range(50)}) == 50


def test_sampling_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    sample(SamplingParams(), torch.zeros(100), [])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_chain_is_in_the_documented_order() -> None:
    chain = sampling.build_chain(everything(typical_p=0.9, top_p=0.9, min_p=0.1, temperature=0.5))
    names = [step.func.__name__ for step in chain]  # type: ignore[attr-defined]
    assert names == ["typical_p", "top_p", "min_p", "temperature"]
    assert sampling.build_chain(everything()) == ()


@pytest.mark.parametrize(("last_n", "best"), [(0, 0), (1, 1), (2, 2), (-1, 3)])
def test_penalties_look_back_repeat_last_n_tokens(last_n: int, best: int) -> None:
    row = torch.tensor([4.0, 3.0, 2.0, 1.0])
    params = SamplingParams(temperature=0, repeat_last_n=last_n, presence_penalty=10)
    assert sample(params, row, [2, 1, 0]) == best


def test_a_banned_token_is_never_chosen() -> None:
    sampler = build_sampler(everything(logit_bias={1: -math.inf}))
    assert {choose(sampler, torch.tensor([0.0, 9.0, 0.0]), [], index) for index in range(50)} == {0, 2}


@given(st.lists(st.tuples(st.sampled_from([0, 1, 3, 40]), st.booleans()), min_size=1, max_size=6))
def test_rows_of_a_batch_are_chosen_from_as_if_alone(wishes: list[tuple[int, bool]]) -> None:
    """Whatever others want to see of theirs."""
    logits = torch.randn(len(wishes), 20, generator=torch.Generator().manual_seed(len(wishes)))
    wants = [everything(top_k=k, temperature=float(warm), logit_bias={k % 7: 9.0}) for k, warm in wishes]
    samplers = [build_sampler(params) for params in wants]
    found = sampling.shortlist(logits, samplers, [[]] * len(wishes))
    together = [sampler.pick(each, 0) for sampler, each in zip(samplers, found, strict=True)]
    assert together == [sample(params, row, []) for params, row in zip(wants, logits, strict=True)]


# --- what can go wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0.0, 0.8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_an_error(bad: float, t: float) -> None:
    with pytest.raises(RequestError, match="logits contain"):
        sample(SamplingParams(temperature=t), torch.tensor([0.0, bad, 1.0]), [])


@pytest.mark.parametrize("t", [0.0, 0.8])
def test_banning_everything_is_an_error(t: float) -> None:
    params = SamplingParams(temperature=t, logit_bias={0: -math.inf, 1: -math.inf})
    with pytest.raises(RequestError, match="no token is left"):
        sample(params, torch.zeros(2), [])


def test_a_bias_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(RequestError, match="token id 5 is not in the vocabulary of 3"):
        sample(SamplingParams(logit_bias={5: 1.0}), torch.zeros(3), [])


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, ">= 0"),
        ("temperature", math.nan, ">= 0"),
        ("temperature", "hot", "a number"),
        ("top_k", -1, ">= 0"),
        ("top_k", 2.5, "an integer"),
        ("top_k", True, "an integer"),
        ("top_p", 1.1, "from 0 to 1"),
        ("min_p", -0.1, "from 0 to 1"),
        ("typical_p", 2, "from 0 to 1"),
        ("repeat_penalty", 0, "> 0"),
        ("repeat_last_n", -2, ">= -1"),
        ("frequency_penalty", math.inf, "a number"),
        ("presence_penalty", None, "a number"),
        ("seed", -1, "from 0 to"),
        ("seed", 2**64, "from 0 to"),
        ("max_tokens", 0, ">= 1"),
        ("ignore_eos", 1, "true or false"),
        ("logit_bias", [1], "a mapping"),
        ("logit_bias", {1: math.nan}, "a finite number"),
        ("logit_bias", {-1: 0.0}, "token ids"),
        ("stop", ("",), "none of them empty"),
        ("stop", 3, "a string"),
        ("stop_token_ids", {-3}, "token ids"),
        ("stop_token_ids", 3, "token ids"),
        *((name, np.array(3), "") for name in ("stop", "stop_token_ids", "samplers", "grammar_triggers")),
    ],
)
def test_a_bad_parameter_is_named_with_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.message.startswith(f"{name}=")
    assert caught.value.hint is not None
    assert allowed in caught.value.hint


def test_collections_are_copied_into_frozen_ones() -> None:
    bias = {1: 2.0}
    params = SamplingParams(stop="end", stop_token_ids=[3, 3], logit_bias=bias)  # type: ignore[arg-type]
    bias[1] = 5.0
    assert params.stop == ("end",)
    assert params.stop_token_ids == frozenset({3})
    assert params.logit_bias == {1: 2.0}


def test_more_stop_strings_join_those_that_are_there() -> None:
    assert SamplingParams(stop="a", top_k=3).with_stops(["b", "a"]) == SamplingParams(
        stop=("a", "b"), top_k=3
    )
