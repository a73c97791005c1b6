"""Fault injection: the n-th call of some function fails, for all n of a scenario.

faults = Faults("run", [(runner, "run")])
with faults.armed(3, MemoryError): ...       # the third call raises
faults.n_calls                               # how many there were
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


class Faults:
    """Counts the calls of some functions, all together, and makes one of them fail."""

    def __init__(self, name: str, places: Sequence[tuple[Any, str]], *, after: bool = False) -> None:
        """`after`: the call does its work and fails then."""
        self.name = name
        self.n_calls = 0
        self._places = places
        self._after = after
        self._fatal = 0
        self._error: BaseException | type[BaseException] = RuntimeError

    @contextmanager
    def armed(self, n: int, error: BaseException | type[BaseException]) -> Iterator[Faults]:
        """The `n`-th call from here on raises `error`; 0: none does."""
        self.n_calls, self._fatal, self._error = 0, n, error
        patches = [
            patch.object(owner, name, self._wrapped(getattr(owner, name))) for owner, name in self._places
        ]
        try:
            for each in patches:
                each.start()
            yield self
        finally:
            for each in patches:
                each.stop()

    def _wrapped(self, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.n_calls += 1
            is_fatal = self.n_calls == self._fatal
            if is_fatal and not self._after:
                raise self._error
            result = function(*arguments, **options)
            if is_fatal:
                raise self._error
            return result

        return call
