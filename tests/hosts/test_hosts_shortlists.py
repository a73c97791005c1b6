"""Shortlists of rows of logits: the same candidates as in whole rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.engine.sampling import candidates
from motley.graph import F32
from motley.graph.ops import Input
from motley.ownership import Word
from motley.runtime.best import largest
from motley.runtime.group import PartSizes
from motley.runtime.hosts.shortlists import best_of, expand, n_values, shorten
from motley.split.collectives import AllGather, Broadcast

VALUES = st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0, math.inf, -math.inf, math.nan])


def through(parts: Sequence[torch.Tensor], k: int) -> torch.Tensor:
    """Rows whose parts have travelled as shortlists."""
    lists = [shorten(part, k) for part in parts]
    for part, short in zip(parts, lists, strict=True):
        assert short.numel() == 2 * n_values(tuple(part.shape), k)
    return torch.cat([expand(short, tuple(p.shape)) for short, p in zip(lists, parts, strict=True)], 1)


@given(st.lists(VALUES, min_size=12, max_size=12), st.integers(1, 5), st.integers(0, 12))
def test_candidates_are_those_of_the_whole_row(values: list[float], k: int, border: int) -> None:
    row = torch.tensor([values])
    found = through([row[:, :border], row[:, border:]], k)
    assert np.array_equal(largest(found.numpy(), k), largest(row.numpy(), k))


def test_long_rows() -> None:
    rows = torch.randn(3, 5000, generator=torch.manual_seed(0)).round(decimals=1)  # many are equal
    found = through([rows[:, :3000], rows[:, 3000:]], 40)
    assert (found > -math.inf).sum() == 3 * 80
    for one, other in zip(candidates(found, 40), candidates(rows, 40), strict=True):
        assert np.array_equal(one[0], other[0])


def test_places_outside_of_a_part_are_not_written() -> None:
    ids = torch.tensor([5, -7, 1], dtype=torch.int32).view(torch.float32)
    found = expand(torch.cat([torch.tensor([1.0, 2.0, 3.0]), ids]), (1, 3))
    assert found.tolist() == [[-math.inf, 3.0, -math.inf]]


def sizes(n_rows: int, n_vocab: int) -> PartSizes:
    node = AllGather(1, Word.run([n_vocab // 2, n_vocab - n_vocab // 2]))(
        Input((n_rows, n_vocab // 2), F32)(name="x")
    )
    return PartSizes.of(node, 2, reader=0)


@pytest.mark.parametrize(
    ("n_rows", "n_vocab", "n_best", "expected"),
    [(8, 1024, 40, 40), (8, 1024, 0, 0), (8, 300, 40, 0), (4096, 100_000, 40, 0)],
)
def test_shortlists_are_used_where_they_are_shorter(
    n_rows: int, n_vocab: int, n_best: int, expected: int
) -> None:
    assert best_of(sizes(n_rows, n_vocab), n_best) == expected


def test_only_rows_are_shortened() -> None:
    word = Word.run([4, 4])
    split_rows = AllGather(0, word)(Input((4, 1024), F32)(name="x"))
    assert best_of(PartSizes.of(split_rows, 2, reader=0), 1) == 0
    assert best_of(PartSizes.of(Broadcast(1, (2, 1024))(), 2, reader=0), 1) == 1
