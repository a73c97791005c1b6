"""How often drafted tokens are right: moving averages by drafter, grade and request. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from motley.engine.drafting.draft import Draft
from motley.engine.request import Request

Key = tuple[str, int]  # drafter, grade

_ALL_KEEP, _ALL_WEIGHT = 0.98, 8.0  # what a draft leaves of earlier ones; the prior counts as so many tokens
_OWN_KEEP, _OWN_WEIGHT = 0.85, 3.0
_FORGET = 0.99  # what an unused draft leaves of earlier ones: after a while drafts are tried again


@dataclass
class _Average:
    n_right: float = 0.0
    n_seen: float = 0.0

    def add(self, n_right: float, n_seen: float, keep: float) -> None:
        self.n_right = self.n_right * keep + n_right
        self.n_seen = self.n_seen * keep + n_seen

    def rate(self, prior: float, weight: float) -> float:
        return (self.n_right + weight * prior) / (self.n_seen + weight)


@dataclass
class Acceptance:
    """The probability that a drafted token is right if all before it are; a request's own drafts count most."""

    priors: dict[str, tuple[float, ...]]  # by drafter: of each grade, before anything is measured
    _all: dict[Key, _Average] = field(default_factory=dict)
    _own: WeakKeyDictionary[Request, dict[Key, _Average]] = field(default_factory=WeakKeyDictionary)

    def rate(self, request: Request, drafter: str, grade: int) -> float:
        key = drafter, grade
        every = self._all.get(key, _Average()).rate(self.priors[drafter][grade], _ALL_WEIGHT)
        return self._own.get(request, {}).get(key, _Average()).rate(every, _OWN_WEIGHT)

    def note(self, request: Request, draft: Draft, n_right: int, is_rejected: bool) -> None:
        """Records how many tokens of a draft were right, and whether one was wrong."""
        self._add(request, draft, n_right, n_right + is_rejected, _ALL_KEEP, _OWN_KEEP)

    def forget(self, request: Request, draft: Draft) -> None:
        """Lets the past fade: the draft was not used, so there is nothing new to learn from it."""
        self._add(request, draft, 0, 0, _FORGET, _FORGET)

    def _add(
        self, request: Request, draft: Draft, right: int, seen: int, all_keep: float, own: float
    ) -> None:
        key = draft.drafter, draft.grade
        self._all.setdefault(key, _Average()).add(right, seen, all_keep)
        self._own.setdefault(request, {}).setdefault(key, _Average()).add(right, seen, own)
