"""Limits the prompt tokens of a step, so that other requests keep getting tokens. Imports no torch."""

from __future__ import annotations

from collections import deque

_GRANULE = 16  # tokens: chunks of few different sizes need few plans
_FIRST = 2 * _GRANULE  # a chunk's size before any step was measured
_MIN_MEASURED = 16  # tokens: smaller steps mostly measure the reading of weights


class Pace:
    """Measures the seconds per token of large steps, and computes how many tokens fit into `stall_seconds`."""

    def __init__(self, stall_seconds: float = 0.25) -> None:
        self.stall_seconds = stall_seconds
        self._costs: deque[float] = deque(maxlen=4)  # seconds a token, of the latest large steps

    def note(self, n_tokens: int, seconds: float) -> None:
        """Records that a step of `n_tokens` took `seconds`."""
        if n_tokens >= _MIN_MEASURED:
            self._costs.append(seconds / n_tokens)

    def max_prompt_tokens(self) -> int:
        """The most prompt tokens of a step in which other requests wait for their next token.

        Computed from the fastest of the latest steps: a step may be slow for another reason, such as making a plan.
        """
        if not self._costs:
            return _FIRST
        n_tokens = int(self.stall_seconds / max(min(self._costs), 1e-9))
        return max(_GRANULE, n_tokens // _GRANULE * _GRANULE)
