"""Sharing out whole units: nothing is lost, nothing drifts, and who asked for nothing gets nothing."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from motley.split.apportion import Apportioner, DeadlineApportioner
from thorough import examples

SHARES = st.lists(st.fractions(0, 10, max_denominator=20), min_size=1, max_size=7).filter(any)
SETTINGS = settings(deadline=None, max_examples=examples(60))
ROUNDS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 2000)), min_size=1, max_size=30)


@settings(SETTINGS)
@given(SHARES, ROUNDS)
def test_each_round_gives_out_all_units_and_none_to_a_share_of_zero(
    shares: list[Fraction], rounds: list[tuple[int, int]]
) -> None:
    apportioner = Apportioner(shares)
    for n_units, unit_bytes in rounds:
        counts = apportioner.share_out(n_units, unit_bytes)
        assert sum(counts) == n_units
        assert min(counts) >= 0
        assert all(n == 0 for n, share in zip(counts, shares, strict=True) if share == 0)


@settings(SETTINGS)
# Whoever lacks most first: somebody would lack a whole unit.
@example([Fraction(n) for n in (1, 1, 1, 3, 3, 3)], 2, 4)
@given(SHARES, st.integers(1, 40), st.integers(1, 60))
def test_rounding_does_not_drift_over_layers(shares: list[Fraction], n_units: int, n_layers: int) -> None:
    """After any number of like rounds each device is within one unit of its exact share."""
    turns, given_out = DeadlineApportioner(shares), [0] * len(shares)
    for layer in range(1, n_layers + 1):
        given_out = [a + b for a, b in zip(given_out, turns.share_out(n_units), strict=True)]
        for got, share in zip(given_out, shares, strict=True):
            assert abs(got - layer * n_units * share / sum(shares)) < 1


@settings(SETTINGS)
@given(SHARES, ROUNDS)
def test_fine_units_make_up_for_coarse_ones(shares: list[Fraction], rounds: list[tuple[int, int]]) -> None:
    """Whatever was shared out before, many small units bring everybody within one of them."""
    apportioner, bytes_of = Apportioner(shares), [0] * len(shares)
    n_bytes = sum(n * size for n, size in rounds)
    for n_units, unit_bytes in [*rounds, (20 * n_bytes + 1, 1)]:
        counts = apportioner.share_out(n_units, unit_bytes)
        bytes_of = [have + n * unit_bytes for have, n in zip(bytes_of, counts, strict=True)]
    total = sum(bytes_of)
    for have, share in zip(bytes_of, shares, strict=True):
        # What is smaller may have had more than its share of the whole.
        if share / sum(shares) >= Fraction(1, 20):
            assert abs(have - total * share / sum(shares)) <= 1


@settings(SETTINGS)
@given(SHARES, st.integers(1, 10))
def test_equal_shares_of_what_divides_are_equal(shares: list[Fraction], n_each: int) -> None:
    counts = Apportioner([1] * len(shares)).share_out(n_each * len(shares))
    assert set(counts) == {n_each}


def test_what_others_shared_out_is_counted_in() -> None:
    apportioner = Apportioner([1, 1])
    apportioner.record([4, 0], 10)
    assert apportioner.share_out(60, 1) == (10, 50)


@pytest.mark.parametrize(("shares", "counts"), [((3, 1), (24, 8)), ((1, 0, 1), (16, 0, 16)), ((5,), (32,))])
def test_proportions(shares: tuple[int, ...], counts: tuple[int, ...]) -> None:
    assert Apportioner(shares).share_out(32) == counts
