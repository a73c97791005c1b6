"""Draws with each sampling parameter follow its definition: a χ² test that finds planted errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from draws import follow

from motley.engine import sampling
from motley.engine.choosing import ChoiceRow, HostChooser
from motley.engine.sampling import SamplingParams, build_sampler

N_DRAWS = 4000
P = np.array([0.30, 0.20, 0.15, 0.12, 0.10, 0.06, 0.04, 0.03])
HISTORY = [0, 0, 1, 5]
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_last_n": -1}

Probabilities = npt.NDArray[np.float64]


def normalized(weights: Probabilities) -> Probabilities:
    return weights / weights.sum()


def first(n: int) -> Probabilities:
    return normalized(np.where(np.arange(len(P)) < n, P, 0))


def scaled(factors: dict[int, float]) -> Probabilities:
    """With the probabilities of these ids multiplied."""
    return normalized(np.array([p * factors.get(i, 1.0) for i, p in enumerate(P)]))


# For each parameter: a setting, what it makes of P, and a wrong setting, which draws no id that should not be drawn.
TYPICAL = normalized(np.where(np.isin(np.arange(len(P)), [1, 2, 3]), P, 0))  # closest to the entropy, 1.86
CASES: dict[str, tuple[dict[str, Any], Probabilities, dict[str, Any]]] = {
    "temperature": ({"temperature": 0.7}, normalized(P ** (1 / 0.7)), {"temperature": 0.85}),
    "top_k": ({"top_k": 4}, first(4), {"top_k": 3}),
    "top_p": ({"top_p": 0.7}, first(4), {"top_p": 0.6}),
    "min_p": ({"min_p": 0.3}, first(5), {"min_p": 0.35}),
    "typical_p": ({"typical_p": 0.4}, TYPICAL, {"typical_p": 0.3}),
    "repeat_penalty": (
        {"repeat_penalty": 1.5},
        normalized(np.array([p ** (1.5 if i in HISTORY else 1) for i, p in enumerate(P)])),
        {"repeat_penalty": 1.3},
    ),
    "repeat_last_n": (
        {"presence_penalty": 0.8, "repeat_last_n": 2},
        scaled(dict.fromkeys((1, 5), math.exp(-0.8))),
        {"presence_penalty": 0.8, "repeat_last_n": 3},
    ),
    "frequency_penalty": (
        {"frequency_penalty": 0.5},
        scaled({0: math.exp(-1), 1: math.exp(-0.5), 5: math.exp(-0.5)}),
        {"frequency_penalty": 0.3},
    ),
    "presence_penalty": (
        {"presence_penalty": 0.5},
        scaled(dict.fromkeys((0, 1, 5), math.exp(-0.5))),
        {"frequency_penalty": 0.5},
    ),
    "logit_bias": (
        {"logit_bias": {2: 1.0, 7: -math.inf}},
        scaled({2: math.e, 7: 0.0}),
        {"logit_bias": {2: 0.8, 7: -math.inf}},
    ),
    "all of them": (
        {"logit_bias": {3: 1.0}, "presence_penalty": 0.5, "top_k": 6, "top_p": 0.9, "temperature": 1.4},
        # After bias and penalty the order is 3, 0, 2, 1, 4, 6; five of these reach 0.9 of the six.
        normalized(
            np.where(
                np.isin(np.arange(len(P)), [0, 1, 2, 3, 4]),
                scaled({3: math.e} | dict.fromkeys((0, 1, 5), math.exp(-0.5))),
                0,
            )
            ** (1 / 1.4)
        ),
        {"logit_bias": {3: 1.0}, "presence_penalty": 0.5, "top_k": 6, "top_p": 0.9, "temperature": 0.9},
    ),
}


def by_specification(params: SamplingParams) -> list[int]:
    sampler, row = build_sampler(params), torch.tensor(P).log().float()

    def choose(index: int) -> int:
        (found,) = sampling.shortlist(row[None], [sampler], [HISTORY])
        return sampler.pick(found, index)

    return [choose(index) for index in range(N_DRAWS)]


def by_engine(params: SamplingParams) -> list[int]:
    sampler = build_sampler(params)
    rows = [ChoiceRow(sampler, HISTORY, index) for index in range(N_DRAWS)]
    logits = torch.tensor(P).log().float().repeat(N_DRAWS, 1)
    tokens = HostChooser().choose(logits, rows).tokens()
    assert all(isinstance(token, int) for token in tokens)
    return [int(token) for token in tokens]  # type: ignore[call-overload]


@pytest.mark.parametrize("draw", [by_specification, by_engine])
@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_definition_and_a_planted_error_does_not(
    name: str, draw: Callable[[SamplingParams], list[int]]
) -> None:
    setting, expected, wrong = CASES[name]
    assert follow(draw(SamplingParams(**OFF | setting, seed=11)), expected)
    assert not follow(draw(SamplingParams(**OFF | wrong, seed=11)), expected)
