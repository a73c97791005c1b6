"""How often drafts are looked for while none is of use. Imports no torch."""

from __future__ import annotations

# After more than so many steps without a draft that was of use, drafts are looked for in one step of so many.
_INTERVALS = ((32, 8), (12, 4), (3, 2))


class Pace:
    """Steps since a draft was of use: after some, drafts are looked for in every second step only, later in every
    fourth and every eighth. The steps between can be computed in one call.
    """

    def __init__(self) -> None:
        self._n_since_use = 0
        self._next = 0  # the value of `_n_since_use` at which drafts are looked for next
        self._latest = 0  # the value at which they were looked for last
        self._interval = 1
        self.n_covered = 1  # steps for which the latest look counts: those since the one before it

    def is_due(self) -> bool:
        """Counts a step; returns whether drafts are looked for in it."""
        self._n_since_use += 1
        if self._n_since_use < self._next:
            return False
        self._interval = next((interval for n, interval in _INTERVALS if self._n_since_use > n), 1)
        self._next = self._n_since_use + self._interval
        self.n_covered, self._latest = self._n_since_use - self._latest, self._n_since_use
        return True

    def note_use(self) -> None:
        """A draft was of use, or is likely to be: from now on, drafts are looked for in each step."""
        self._n_since_use, self._next, self._latest, self._interval = 0, 0, 0, 1

    def pass_over(self, n_steps: int) -> None:
        """So many steps come without a call of `is_due`."""
        self._n_since_use += n_steps

    @property
    def n_pause(self) -> int:
        """How many of the next steps need no look: a whole pause, also in the middle of one, as a call of few steps
        takes as much of Python as one of many.
        """
        return self._interval - 1
