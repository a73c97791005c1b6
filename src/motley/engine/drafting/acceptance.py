"""How often drafted tokens are right: moving averages by drafter and grade, and by request. Imports no torch.

A rate is that of all requests' drafts of the same drafter and grade, times a factor of the request: how many of its
drafted tokens were right, divided by the number that the rates predict. So a few wrong drafts, of any grade, are enough
to see that a request's text cannot be guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from motley.engine.drafting.draft import Draft
from motley.engine.request import Request

_ALL_KEEP, _ALL_WEIGHT = 0.98, 24.0  # weights: of earlier drafts after a new one, and of the prior in tokens
_REQUEST_KEEP, _REQUEST_WEIGHT = 0.85, 2.0
_DECAY = 0.99  # the weight of earlier drafts after an unused one: after a while drafts are tried again
_MAX_RATE = 0.98
_MIN_TRUSTED_RATE = 0.6  # drafts with a lower assumed rate are watched before one of them is used
_MIN_EVIDENCE = 1.5  # right tokens plus expected right tokens that must be seen before drafts are used
_YIELD_KEEP, _YIELD_WEIGHT = 0.9, 8.0
_REQUEST_RATE, _YIELD, _UNUSED = "acceptance", "yield", "unused draft"  # keys of a request's memory


class WatchedDraft(NamedTuple):
    """A draft that was not used."""

    draft: Draft
    start: int  # generated tokens before it
    n_wanted: int = 0  # tokens of it that would have been used if there were a plan
    n_right: int = 0  # of the draft, once they have come


@dataclass(slots=True)
class _Average:
    """Tokens that were right, and the number that this is compared with. Old tokens lose weight."""

    n_right: float = 0.0
    n_of: float = 0.0

    def add(self, n_right: float, n_of: float, keep: float) -> None:
        self.n_right = self.n_right * keep + n_right
        self.n_of = self.n_of * keep + n_of

    def rate(self, prior: float, weight: float) -> float:
        return (self.n_right + weight * prior) / (self.n_of + weight)


_NOTHING = _Average()  # before anything is measured


@dataclass
class Acceptance:
    """The probability that a drafted token is right if all before it are."""

    priors: dict[str, tuple[float, ...]]  # by drafter: of each grade, before anything is measured
    _all: dict[tuple[str, int], _Average] = field(
        default_factory=dict
    )  # by drafter and grade, of tokens seen

    def rate(self, request: Request, drafter: str, grade: int) -> float:
        own = request.memory.get(_REQUEST_RATE)
        factor = 1.0 if own is None else own.rate(1.0, _REQUEST_WEIGHT)
        return min(_MAX_RATE, self._usual(drafter, grade) * factor)

    def note(self, request: Request, draft: Draft, n_right: int, is_rejected: bool) -> None:
        """Records how many tokens of a draft were right, and whether one was wrong."""
        n_seen = n_right + is_rejected
        average = self._all.setdefault((draft.drafter, draft.grade), _Average())
        usual = average.rate(self.priors[draft.drafter][draft.grade], _ALL_WEIGHT)
        own = _request_average(request)
        if not draft.parents:
            rate, n = min(_MAX_RATE, usual * own.rate(1.0, _REQUEST_WEIGHT)), len(draft.tokens)
            n_expected = rate * (1 - rate**n) / (1 - rate)
            request.memory.setdefault(_YIELD, _Average()).add(n_right, n_expected, _YIELD_KEEP)
        own.add(n_right, n_seen * usual, _REQUEST_KEEP)
        average.add(n_right, n_seen, _ALL_KEEP)

    def chance(self, request: Request, drafter: str, grade: int) -> tuple[float, float]:
        """`rate`, or 0.0 as long as such drafts are only watched, because too little is known of them; and the yield:
        tokens that the request's drafts gave, divided by the tokens that its rates predict; at most 1.

        Rates predict too many tokens for a text that mostly continues as drafted or not at all.
        """
        memory = request.memory
        own: _Average | None = memory.get(_REQUEST_RATE)
        yields: _Average | None = memory.get(_YIELD)
        ratio = 1.0 if yields is None else min(1.0, yields.rate(1.0, _YIELD_WEIGHT))
        prior = self.priors[drafter][grade]
        if prior < _MIN_TRUSTED_RATE and (own is None or own.n_of + own.n_right < _MIN_EVIDENCE):
            return 0.0, ratio
        factor = 1.0 if own is None else own.rate(1.0, _REQUEST_WEIGHT)
        return min(_MAX_RATE, self._usual(drafter, grade) * factor), ratio

    def watch(self, request: Request, draft: Draft, n_wanted: int = 0) -> None:
        """Keeps a draft that is not used, to compare it with the tokens that come: this costs no rows."""
        if _UNUSED not in request.memory:
            request.memory[_UNUSED] = WatchedDraft(draft, len(request.generated), n_wanted)

    def check_watched(self, request: Request) -> WatchedDraft | None:
        """Records how many tokens of the watched draft were right, and returns it, once the answer is long enough."""
        unused: WatchedDraft | None = request.memory.get(_UNUSED)
        if unused is None:
            return None
        draft, start, n_wanted, _ = unused
        came = request.generated[start : start + len(draft.tokens)]
        n_right, is_rejected = draft.n_right(came)
        if n_right == len(came) < len(draft.tokens):
            return None
        del request.memory[_UNUSED]
        self.note(request, draft, n_right, is_rejected)
        return WatchedDraft(draft, start, n_wanted, n_right)

    def decay(self, request: Request, draft: Draft, n_steps: int = 1) -> None:
        """Reduces the weight of earlier drafts: this draft was not used in `n_steps`, which give no new measurement."""
        keep = _DECAY**n_steps
        _request_average(request).add(0, 0, keep)
        self._all.setdefault((draft.drafter, draft.grade), _Average()).add(0, 0, keep)

    def _usual(self, drafter: str, grade: int) -> float:
        """The rate over all requests."""
        return self._all.get((drafter, grade), _NOTHING).rate(self.priors[drafter][grade], _ALL_WEIGHT)


def _request_average(request: Request) -> _Average:
    """The request's own drafts: tokens that were right, and tokens that were expected to be right."""
    average = request.memory.get(_REQUEST_RATE)
    if average is None:
        average = request.memory[_REQUEST_RATE] = _Average()
    return average
