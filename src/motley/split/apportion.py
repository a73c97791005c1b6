"""Apportioning whole units by share, so that each device's total stays close to its exact share."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


class DeadlineApportioner:
    """Apportions equal units one by one: after each unit, every device is less than one unit away from its share of
    all units so far.

    The j-th unit of a device with share x of the whole must not come before round (j - 1) / x (the device would have
    one unit too many), nor after round j / x, its deadline (it would have one too few). Of the devices that may take
    the next unit, the one with the earliest deadline gets it; that never fails (Steiner and Yeomans 1993). Giving it to
    the device with the largest deficit seems as good, but can leave a device a whole unit behind.
    """

    def __init__(self, shares: Sequence[Fraction | int]) -> None:
        fractions = [Fraction(share) for share in shares]
        unit = lcm(*(share.denominator for share in fractions))
        self._weights = [int(share * unit) for share in fractions]  # shares as whole numbers
        self._total = sum(self._weights)
        assert self._total > 0, "shares are checked where they enter"
        self._given = [0] * len(shares)
        self._n_rounds = 0

    def share_out(self, n_units: int) -> tuple[int, ...]:
        """How many of the next `n_units` each device gets. A device with share 0 never gets any."""
        before = tuple(self._given)
        for _ in range(n_units):
            self._n_rounds += 1
            may_come = [
                device
                for device, weight in enumerate(self._weights)
                if self._given[device] * self._total < self._n_rounds * weight
            ]
            self._given[min(may_come, key=self._deadline)] += 1
        return tuple(after - n for after, n in zip(self._given, before, strict=True))

    def _deadline(self, device: int) -> int:
        """The last round in which the device's next unit may come."""
        return -(-(self._given[device] + 1) * self._total // self._weights[device])


class Apportioner:
    """Apportions units of various sizes, round by round, in proportion to `shares`.

    It keeps the bytes owed to each device. A round gives each device the amount owed, rounded to whole units, so
    rounding errors do not accumulate, and a round of fine units (FFN columns) corrects one of coarse units (heads).
    After any round a device is within one unit of its share, unless it was owed less than nothing before: then it
    gets nothing. A device with share 0 never gets anything.
    """

    def __init__(self, shares: Sequence[Fraction | int]) -> None:
        total = sum(shares, Fraction(0))
        assert total > 0, "shares are checked where they enter"
        self._shares = [Fraction(share) / total for share in shares]
        self._owed = [Fraction(0)] * len(shares)  # bytes

    def record(self, counts: Sequence[int], unit_bytes: int) -> None:
        """Add a round whose counts were decided elsewhere. Later rounds correct its deviations from the shares."""
        total = sum(counts) * unit_bytes
        self._owed = [
            owed + share * total - n * unit_bytes
            for owed, share, n in zip(self._owed, self._shares, counts, strict=True)
        ]

    def share_out(self, n_units: int, unit_bytes: int = 1) -> tuple[int, ...]:
        """How many of `n_units` each device gets in this round."""
        owed_now = [
            owed + share * n_units * unit_bytes for owed, share in zip(self._owed, self._shares, strict=True)
        ]
        wanted = [max(Fraction(0), owed) / unit_bytes for owed in owed_now]
        scale = min(Fraction(1), n_units / sum(wanted)) if any(wanted) else Fraction(0)
        counts = [int(units * scale) for units in wanted]
        for _ in range(n_units - sum(counts)):
            left = [owed - n * unit_bytes for owed, n in zip(owed_now, counts, strict=True)]
            sharers = [i for i, share in enumerate(self._shares) if share > 0]
            counts[max(sharers, key=lambda i: (left[i], -i))] += 1
        self.record(counts, unit_bytes)
        return tuple(counts)
