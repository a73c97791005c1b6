"""The largest values of rows: which logits a sampler needs, and which have to travel to it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

STRETCH = 128  # values

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


def largest(rows: Rows, k: int) -> list[Ids]:
    """For each row, the places of its `k` largest values in descending order; of equal values the first ones.

    In numpy: torch would start threads, which compete with the threads that compute. The k-th largest of the maxima of
    stretches is a lower bound of the k-th largest value, and few values reach it. NaN sorts above all numbers, as in
    torch.
    """
    if k == 1:
        return list(rows.argmax(1)[:, None])
    n_stretches = rows.shape[1] // STRETCH
    if k > n_stretches:
        return [_first(row, np.arange(len(row)), k) for row in rows]
    maxima = rows[:, : n_stretches * STRETCH].reshape(len(rows), -1, STRETCH).max(2)
    enough = np.partition(maxima, -k)[:, -k]
    return [_first(row, (~(row < least)).nonzero()[0], k) for row, least in zip(rows, enough, strict=True)]


def _first(row: Rows, places: Ids, k: int) -> Ids:
    """The `k` largest of the values at some places, which are in ascending order."""
    falling = places[::-1]
    found: Ids = falling[row[falling].argsort(kind="stable")[: -k - 1 : -1]]
    return found
