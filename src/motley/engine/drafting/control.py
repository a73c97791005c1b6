"""How many drafted tokens a step computes: as many as make tokens come fastest, often none. Imports no torch.

A drafted token is worth the probability that it survives, the product of those of its draft so far, and costs what
a step with one row more takes longer. Rows go to the tokens most likely to survive, in whatever request they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from motley.engine.drafting.acceptance import Acceptance
from motley.engine.drafting.costs import PlanAccount, RoundCosts, StepCosts
from motley.engine.drafting.draft import Draft
from motley.engine.request import Request
from motley.engine.trees import depths

_LEAST_GAIN = 1.1  # of the rate: less is not worth the uncertainty of the figures
_LEAST_SURVIVAL = 0.01  # of a drafted token: less is not worth looking at
_ROUND = 0.2  # of a step of one row: the assumed cost of a drafter's round before one was measured

Drafts = dict[Request, Draft]


class Control(Protocol):
    """Decides how long drafts are."""

    def length(self, drafter: str, requests: Sequence[Request], n_rows: int, n_max: int) -> int:
        """The tokens of drafts for which a drafter that takes time is asked; 0: none pay."""
        ...

    def allot(self, drafts: Mapping[Request, Draft], n_rows: int, room: int) -> Drafts:
        """The drafts, shortened to what pays and to `room` tokens. `n_rows`: of the step without drafts."""
        ...

    def note_draft(self, request: Request, draft: Draft, n_right: int, is_rejected: bool) -> None: ...

    def note_step(self, n_rows: int, seconds: float) -> None: ...

    def note_plan(self, n_rows: int, seconds: float) -> None:
        """Records that a step of `n_rows` made a plan, and took `seconds`."""
        ...

    def note_drafting(self, drafter: str, n_rounds: int, seconds: float) -> None: ...


class AdaptiveControl:
    """Maximizes the expected tokens per second, from measured costs and acceptance."""

    def __init__(
        self,
        priors: dict[str, tuple[float, ...]],
        bucket: Callable[[int], int] = lambda n_rows: n_rows,
        plan_seconds: float = 0.0,
    ) -> None:
        """`bucket`: the rows for which a plan is made, by the rows of a step. `plan_seconds`: of a plan; 0.0: unknown,
        so the first one is made to find out.
        """
        self.costs = StepCosts()
        self._plans = PlanAccount(bucket, plan_seconds)
        self.acceptance = Acceptance(priors)
        self._costly: set[str] = set()  # drafters that take time
        self._rounds = {drafter: RoundCosts() for drafter in priors}

    def length(self, drafter: str, requests: Sequence[Request], n_rows: int, n_max: int) -> int:
        if not self.costs.is_known(n_rows):
            return 0  # a step without drafts tells
        rates = [self.acceptance.rate(request, drafter, 0) for request in requests]
        base, *costs = self.costs.seconds_from(n_rows, 1 + n_max, len(rates))
        per_round = self._rounds[drafter].seconds(_ROUND * self.costs.seconds(1))
        best, n_best = n_rows / base * _LEAST_GAIN, 0
        n_tokens, survival = float(n_rows), [1.0] * len(rates)
        for n, seconds in enumerate(costs, start=1):
            survival = [s * rate for s, rate in zip(survival, rates, strict=True)]
            n_tokens += sum(survival)
            gain = n_tokens / (seconds + n * per_round)
            if gain > best:
                best, n_best = gain, n
        if n_best:
            self._costly.add(drafter)
        else:
            self._rounds[drafter].note_unused()
            for request in requests:
                self.acceptance.forget(request, Draft((), drafter))
        return n_best

    def allot(self, drafts: Mapping[Request, Draft], n_rows: int, room: int) -> Drafts:
        if not self.costs.is_known(n_rows):
            return {}  # a step without drafts tells
        rates = []
        for request, draft in drafts.items():
            self.acceptance.look(request)
            rates.append(self.acceptance.rate(request, draft.drafter, draft.grade))
        # Even endless drafts, at the price of one row: if they do not pay, the rest need not be computed.
        n_most = n_rows + sum(rate / (1 - rate) for rate in rates)
        if n_most / self.costs.seconds(n_rows + 1) < n_rows / self.costs.seconds(n_rows) * _LEAST_GAIN:
            return self._cut(drafts, dict.fromkeys(drafts, 0))
        slots: list[tuple[float, int, Request]] = []
        for order, (rate, (request, draft)) in enumerate(zip(rates, drafts.items(), strict=True)):
            slots += [(-survival, order, request) for survival in _survivals(draft, rate)]
        slots.sort(key=lambda slot: slot[:2])
        lengths = dict.fromkeys(drafts, 0)
        is_paid = any(
            draft.drafter in self._costly for draft in drafts.values()
        )  # then plans are made as well
        n_best = self._n_best([-slot[0] for slot in slots[:room]], n_rows, may_plan=is_paid)
        for _, _, request in slots[:n_best]:
            lengths[request] += 1
        return self._cut(drafts, lengths)

    def _n_best(self, survivals: Sequence[float], n_rows: int, *, may_plan: bool) -> int:
        """How many drafted tokens make tokens come fastest, of tokens in descending order of survival."""
        base = self.costs.seconds(n_rows)
        least = n_rows / base * _LEAST_GAIN
        found = {True: (least, 0, 0.0), False: (least, 0, 0.0)}  # rate, tokens, seconds saved; by: has a plan
        n_tokens, n_most = float(n_rows), n_rows + sum(survivals)
        for n, survival in enumerate(survivals, start=1):
            n_tokens += survival
            seconds = self.costs.seconds(n_rows + n)
            if n_most <= least * seconds:
                break  # more rows take no less time
            if n_tokens / seconds <= least:
                continue
            is_planned = may_plan or self._plans.has(n_rows + n)
            if n_tokens / seconds > found[is_planned][0]:
                found[is_planned] = n_tokens / seconds, n, n_tokens * base / n_rows - seconds
        (rate, n_planned, saved), (new_rate, n_new, new_saved) = found[True], found[False]
        if n_new and new_rate > rate and self._plans.save(new_saved - saved):
            return n_new
        return n_planned

    def _cut(self, drafts: Mapping[Request, Draft], lengths: Mapping[Request, int]) -> Drafts:
        kept: Drafts = {}
        for request, draft in drafts.items():
            n = lengths[request]
            if n >= max(1, request.speculation.draft_min):
                kept[request] = draft.cut(n)
            else:
                self.acceptance.watch(request, draft)
        return kept

    def note_draft(self, request: Request, draft: Draft, n_right: int, is_rejected: bool) -> None:
        self.acceptance.note(request, draft, n_right, is_rejected)

    def note_step(self, n_rows: int, seconds: float) -> None:
        self.costs.note(n_rows, seconds)
        self._plans.note_step(n_rows)

    def note_plan(self, n_rows: int, seconds: float) -> None:
        self._plans.note(n_rows, seconds)

    def note_drafting(self, drafter: str, n_rounds: int, seconds: float) -> None:
        self._rounds[drafter].note(seconds / n_rounds)


def _survivals(draft: Draft, rate: float) -> list[float]:
    """For each token the probability that it is right and used.

    In a tree it is the expected number of right tokens, shared equally: which alternative is right is not known, and
    tokens that only serve to learn belong to it.
    """
    if draft.parents:
        n_right = sum(rate**depth for depth in range(1, max(depths(draft.parents)) + 1))
        return [n_right / len(draft.tokens)] * len(draft.tokens)
    survivals: list[float] = []
    survival = 1.0
    for _ in draft.tokens:
        survival *= rate
        if survival < _LEAST_SURVIVAL:
            break
        survivals.append(survival)
    return survivals


class FixedControl:
    """Uses all drafted tokens for which there is room: for measurements and tests."""

    def length(self, drafter: str, requests: Sequence[Request], n_rows: int, n_max: int) -> int:
        return n_max

    def allot(self, drafts: Mapping[Request, Draft], n_rows: int, room: int) -> Drafts:
        kept: Drafts = {}
        for request, draft in drafts.items():
            if draft.tokens and room > 0:
                kept[request] = own = draft.cut(room)
                room -= len(own.tokens)
        return kept

    def note_draft(self, request: Request, draft: Draft, n_right: int, is_rejected: bool) -> None:
        pass

    def note_step(self, n_rows: int, seconds: float) -> None:
        pass

    def note_plan(self, n_rows: int, seconds: float) -> None:
        pass

    def note_drafting(self, drafter: str, n_rounds: int, seconds: float) -> None:
        pass
