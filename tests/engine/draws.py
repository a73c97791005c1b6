"""Whether draws follow a distribution: Pearson's χ² test."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def probabilities(logits: npt.NDArray[np.float64], temperature: float = 1.0) -> npt.NDArray[np.float64]:
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def follow(drawn: Iterable[int], probs: npt.NDArray[np.float64]) -> bool:
    """Whether such counts, or more unlikely ones, come up in more than 1 of 10,000 experiments.

    Rare ids (fewer than five expected) count as one.
    """
    counts = Counter(drawn)
    n = sum(counts.values())
    assert all(probs[token] > 0 for token in counts), "an id was drawn that has no probability"
    expected, seen = probs * n, np.array([counts[i] for i in range(len(probs))], float)
    is_rare = expected < 5
    groups = np.append(expected[~is_rare], expected[is_rare].sum())
    found = np.append(seen[~is_rare], seen[is_rare].sum())
    groups, found = groups[groups > 0], found[groups > 0]
    statistic = float(((found - groups) ** 2 / groups).sum())
    return statistic < _quantile(len(groups) - 1, 3.719)  # of a standard normal: 0.9999


def _quantile(freedom: int, normal: float) -> float:
    """Of χ², by Wilson and Hilferty: good to a percent."""
    return freedom * (1 - 2 / (9 * freedom) + normal * math.sqrt(2 / (9 * freedom))) ** 3
