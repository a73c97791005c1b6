"""The time of a step by its number of rows, measured while the engine works. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache

_EDGES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # the largest number of rows of each bucket
_MAX_ROWS = 64  # of a step with drafts
_N_KEPT = 8  # latest steps of a bucket
_N_NEEDED = 3  # steps: the first of a kind may also compile something, and others may be disturbed
_MAX_AGE = 2048  # steps: then steps of so many rows are measured again, as contexts grow
_ROUNDS_NEEDED, _MAX_UNUSED = 3, 2048  # a drafter's rounds; steps in which its drafts did not pay
_PLAN_MARGIN = 0.5  # what a plan would have saved, relative to its price: then it is made
_LATER_MARGIN = 4.0  # the same where plans are also made while the engine is idle
_FRESH = 256  # steps: after so many, the cost of a step without drafts is measured again
_SECOND, _SLOPE = (
    0.4,
    0.1,
)  # of the second row, and of each row, relative to one row, where nothing is measured


@dataclass
class _Bucket:
    """The latest steps of similar numbers of rows."""

    rows: deque[int] = field(default_factory=lambda: deque(maxlen=_N_KEPT))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_N_KEPT))
    latest: int = 0  # number of the latest step
    _point: tuple[float, float] | None = None

    def add(self, n_rows: int, seconds: float, step: int) -> None:
        self.rows.append(n_rows)
        self.seconds.append(seconds)
        self.latest, self._point = step, None

    @property
    def point(self) -> tuple[float, float]:
        """(rows, seconds)."""
        if self._point is None:
            self._point = sum(self.rows) / len(self.rows), usual(self.seconds)
        return self._point


class StepCosts:
    """Seconds of steps by their rows; between measured numbers of rows they are interpolated."""

    def __init__(self, computed: Callable[[int], int] = lambda n_rows: n_rows) -> None:
        """`computed`: the rows that a device computes, by the rows of a step: more where it computes padding."""
        self._computed = cache(computed)
        self._buckets: dict[int, _Bucket] = {}
        self.n_steps = 0
        self._n_new = 0  # steps since `_found` was found
        self._found: (
            list[tuple[float, float]] | None
        ) = []  # rows and seconds, both ascending; None: to be found
        self._prices: dict[int, float] = {}  # by rows: the results of `row_price`
        self._seconds: dict[int, float] = {}  # by rows, as `_found` says

    def note(self, n_rows: int, seconds: float) -> None:
        """Records that a step of `n_rows` took `seconds`. Every step calls it: the rest is left to `_points`, and once
        there are enough steps of a bucket, a single one changes little.
        """
        self.n_steps += 1
        n_rows = self._computed(n_rows)
        number = bisect_left(_EDGES, n_rows)
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = _Bucket()
        bucket.add(n_rows, seconds, self.n_steps)
        self._n_new += 1
        if self._n_new >= _N_KEPT or len(bucket.seconds) < _N_KEPT:
            self._found = None

    @property
    def _points(self) -> list[tuple[float, float]]:
        if self._found is None:
            for number in [n for n, b in self._buckets.items() if self.n_steps - b.latest > _MAX_AGE]:
                del self._buckets[number]
            self._found, self._seconds, self._prices, self._n_new = [], {}, {}, 0
            measured = [each for each in self._buckets.values() if len(each.seconds) >= _N_NEEDED]
            for rows, cost in sorted(each.point for each in measured):
                least = self._found[-1][1] if self._found else 0.0
                self._found.append((rows, max(cost, least)))  # more rows never take less time
        return self._found

    def is_known(self, n_rows: int) -> bool:
        """Whether steps of so many rows were measured, and not long ago."""
        bucket = self._buckets.get(bisect_left(_EDGES, self._computed(n_rows)))
        return (
            bucket is not None and len(bucket.seconds) >= _N_NEEDED and self.n_steps - bucket.latest <= _FRESH
        )

    def seconds(self, n_rows: int) -> float:
        """The expected seconds of a step; in units of a step of one row as long as no step was measured."""
        points = self._points
        found = self._seconds.get(n_rows)
        if found is None:
            found = self._seconds[n_rows] = self._interpolated(points, self._computed(n_rows))
        return found

    def _interpolated(self, points: Sequence[tuple[float, float]], n_rows: int) -> float:
        at = bisect_left(points, (n_rows, 0.0))
        if not points:
            return _shape(n_rows)
        if at == 0:
            rows, cost = points[0]
            return cost * _shape(n_rows) / _shape(rows)
        if at == len(points):
            return self._beyond(n_rows)
        (low, low_cost), (high, high_cost) = points[at - 1], points[at]
        return low_cost + (high_cost - low_cost) * (n_rows - low) / (high - low)

    def seconds_from(self, n_rows: int, n: int, stride: int = 1) -> list[float]:
        """The expected seconds of steps of `n_rows`, `n_rows` + `stride`, …: `n` numbers."""
        self.seconds(n_rows)  # brings the others up to date
        known = self._seconds
        return [known.get(rows) or self.seconds(rows) for rows in range(n_rows, n_rows + n * stride, stride)]

    def row_price(self, n_rows: int, least_gain: float) -> float:
        """The tokens that each row beyond `n_rows` must give on average, so that a step with more rows, however many,
        gives `least_gain` times as many tokens per second. Always called with the same `least_gain`.
        """
        base = self.seconds(n_rows)
        price = self._prices.get(n_rows)
        if price is None:
            more = (n_rows + 1, *(edge for edge in _EDGES if n_rows < edge <= _MAX_ROWS))
            price = min(n_rows * (least_gain * self.seconds(n) / base - 1) / (n - n_rows) for n in more)
            self._prices[n_rows] = price
        return price

    def _beyond(self, n_rows: int) -> float:
        """Seconds of more rows than were measured. Half of the latest slope: the first rows more may cost most."""
        (rows, cost), *others = self._points[::-1]
        if not others:
            return cost * _shape(n_rows) / _shape(rows)
        before, lower = others[0]
        slope = max(cost * _SLOPE / _shape(rows), (cost - lower) / (rows - before) / 2)
        return cost + slope * (n_rows - rows)


Preparation = Callable[
    [int, int, int], Hashable
]  # of steps, by rows, requests, and the most rows of a request


def by_rows(n_rows: int, n_requests: int, most_rows: int) -> Hashable:
    """A preparation that depends on the number of rows only."""
    return n_rows


class PlanAccount:
    """Whether steps of a new kind are worth the plan that they need, or the graph that has to be captured for them.

    A plan is made once it would have saved half of what it costs, so an answer whose drafts are wrong never waits for
    one; where its price is given, four times what it costs, as it will be made while the engine is idle. What it would
    have saved is known for drafts that were not used, once the tokens have come.
    """

    def __init__(self, preparation: Preparation = by_rows, price: float = 0.0) -> None:
        """`preparation`: what a step needs; equal values are one plan. `price`: its seconds; 0.0: unknown."""
        self._preparation = cache(preparation)
        self._made: set[Hashable] = set()
        self._latest = (0, 0, 0)  # the steps of the latest `add`
        self._is_given = price > 0
        self._price = price  # unless given, of the cheapest so far, as the first one also loads other things
        self._saved = 0.0

    def note(self, n_rows: int, seconds: float, n_requests: int = 0, most_rows: int = 1) -> None:
        """Records that a step of `n_rows` made a plan; `seconds`: how much longer it took for that.

        `n_requests`: in the step (0: one for each row). `most_rows`: of a request.
        """
        self.add(n_rows, n_requests, most_rows)
        if most_rows > 1:  # the plan that was wanted
            self._saved = 0.0
        if not self._is_given:
            self._price = min(self._price, seconds) if self._price else seconds

    def add(self, n_rows: int, n_requests: int = 0, most_rows: int = 1) -> None:
        """Records that there is a plan for such steps."""
        step = n_rows, n_requests or n_rows, most_rows
        if step != self._latest:  # mostly the same as in the step before
            self._made.add(self._preparation(*step))
            self._latest = step

    def has(self, n_rows: int, n_requests: int = 0, most_rows: int = 1) -> bool:
        """Whether there is a plan for such a step."""
        return self._preparation(n_rows, n_requests or n_rows, most_rows) in self._made

    def credit(self, seconds: float) -> None:
        """Records what a plan that is not there would have saved in a step; below 0: lost."""
        self._saved = max(0.0, self._saved + seconds)

    @property
    def is_enough(self) -> bool:
        """Whether the plan is worth its price, and may be made."""
        return self._saved >= (_LATER_MARGIN if self._is_given else _PLAN_MARGIN) * self._price


class RoundCosts:
    """Seconds of a drafter's round, which gives one token to each draft."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_N_KEPT)
        self._n_unused = 0

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._n_unused = 0

    def note_unused(self, n_steps: int = 1) -> None:
        """Records that drafts did not pay in so many steps. After a while they are tried again, as measurements may
        have been wrong.
        """
        self._n_unused += n_steps
        if self._n_unused >= _MAX_UNUSED:
            self._seconds.clear()
            self._n_unused = 0

    def seconds(self, default: float) -> float:
        return usual(self._seconds) if len(self._seconds) >= _ROUNDS_NEEDED else default


def usual(seconds: Sequence[float]) -> float:
    """The low quartile: a step may be slow for another reason."""
    return sorted(seconds)[len(seconds) // 4]


def _shape(n_rows: float) -> float:
    return 1 + _SLOPE * (n_rows - 1) + _SECOND * min(1.0, n_rows - 1)
