"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable

from motley.errors import RequestError


class StopChecker:
    """Passes text on until a stop string is complete, and never shows a part of one.

    The first stop string to be *complete* ends the text; of several with the same end, the longest.
    So the outcome depends on the text alone and not on how it was cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise RequestError("a stop string is empty", hint="leave it out; it would stop at once")
        self._held = ""
        self._stopped = False
        self.found: str | None = None  # the stop string that ended the text

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string has occurred."""
        if self._stopped:
            return "", True
        if not self._stops:
            return piece, False
        text = self._held + piece
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self._held, self._stopped = "", True
            _, at, self.found = min(hits)
            return text[:at], True
        n_held = self._n_held(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], False

    def flush(self) -> str:
        """The text that was held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _n_held(self, text: str) -> int:
        """The length of the longest end of `text` that is the beginning of a stop string."""
        longest = max(map(len, self._stops)) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
