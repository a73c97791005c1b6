"""Sharing out whole units by proportion, fairly over many rounds."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


class Apportioner:
    """Hands out units round by round (layer by layer). In each round every device gets its quota rounded down or up,
    so it is within one unit of what was asked; who is rounded up is whoever is owed most so far, so errors do not
    add up over rounds. A device with share 0 never gets anything.
    """

    def __init__(self, shares: Sequence[Fraction | int]) -> None:
        total = sum(shares, Fraction(0))
        assert total > 0, "shares are checked where they enter"
        self._shares = [Fraction(share) / total for share in shares]
        self._owed = [Fraction(0)] * len(shares)  # units asked for so far minus units given

    def share_out(self, n_units: int) -> tuple[int, ...]:
        """How many of `n_units` each device gets in this round."""
        quotas = [share * n_units for share in self._shares]
        counts = [int(quota) for quota in quotas]
        self._owed = [owed + quota - n for owed, quota, n in zip(self._owed, quotas, counts, strict=True)]
        can_round_up = [i for i, (quota, n) in enumerate(zip(quotas, counts, strict=True)) if quota > n]
        can_round_up.sort(key=lambda i: (-self._owed[i], i))
        for i in can_round_up[: n_units - sum(counts)]:
            counts[i] += 1
            self._owed[i] -= 1
        return tuple(counts)
