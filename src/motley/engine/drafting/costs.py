"""What a step takes, by its number of rows: measured while the engine works. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

_EDGES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # the largest number of rows of each bucket
_N_KEPT = 8  # latest steps of a bucket
_MAX_AGE = 512  # steps: an older measurement says little, as contexts grow
_SLOPE = 0.1  # of a row more, relative to a step of one row, where nothing is measured


@dataclass
class _Bucket:
    """The latest steps of similar numbers of rows."""

    rows: deque[int] = field(default_factory=lambda: deque(maxlen=_N_KEPT))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_N_KEPT))
    latest: int = 0  # number of the latest step

    @property
    def point(self) -> tuple[float, float]:
        """(rows, seconds). Of the seconds a low quartile: a step may be slow for another reason."""
        return sum(self.rows) / len(self.rows), sorted(self.seconds)[len(self.seconds) // 4]


class StepCosts:
    """Seconds of steps by their rows; between measured numbers of rows they are interpolated."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._n_steps = 0
        self._points: list[tuple[float, float]] = []  # rows and seconds, both ascending

    def note(self, n_rows: int, seconds: float) -> None:
        """Records that a step of `n_rows` took `seconds`."""
        self._n_steps += 1
        bucket = self._buckets.setdefault(bisect_left(_EDGES, n_rows), _Bucket())
        bucket.rows.append(n_rows)
        bucket.seconds.append(seconds)
        bucket.latest = self._n_steps
        for number in [n for n, b in self._buckets.items() if self._n_steps - b.latest > _MAX_AGE]:
            del self._buckets[number]
        self._points = []
        for rows, cost in sorted(each.point for each in self._buckets.values()):
            least = self._points[-1][1] if self._points else 0.0
            self._points.append((rows, max(cost, least)))  # more rows never take less time

    def seconds(self, n_rows: int) -> float:
        """The expected seconds of a step; in units of a step of one row as long as no step was measured."""
        points = self._points
        at = bisect_left(points, (n_rows, 0.0))
        if not points:
            return _shape(n_rows)
        if at == len(points) or at == 0:
            rows, cost = points[min(at, len(points) - 1)]
            return cost * _shape(n_rows) / _shape(rows)
        (low, low_cost), (high, high_cost) = points[at - 1], points[at]
        return low_cost + (high_cost - low_cost) * (n_rows - low) / (high - low)


def _shape(n_rows: float) -> float:
    return 1 + _SLOPE * (n_rows - 1)
