"""How many drafted tokens a step computes: as many as make tokens come fastest, often none. Imports no torch.

A drafted token is worth the probability that it survives, the product of those of its draft so far, and costs what
a step with one row more takes longer. Rows go to the tokens most likely to survive, in whatever request they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from motley.engine.drafting.acceptance import Acceptance
from motley.engine.drafting.costs import PlanAccount, Preparation, RoundCosts, StepCosts, by_rows
from motley.engine.drafting.draft import Draft
from motley.engine.request import Request
from motley.engine.trees import depths

_MIN_GAIN = 1.1  # of the rate: less is not worth the uncertainty of the figures
_MIN_SURVIVAL = 0.01  # of a drafted token: less is not worth looking at
_ROUND = 0.2  # of a step of one row: the assumed cost of a drafter's round before one was measured
_WAIT_COST = 0.2  # of a step: the assumed cost of waiting for the host before it was measured

Drafts = dict[Request, Draft]


class _Best(NamedTuple):
    """How many drafted tokens a step should have."""

    n_tokens: int  # that have a plan; 0: none pay
    n_wanted: int = 0  # if there were a plan; 0: there is one for the best number
    gain: float = 0.0  # the seconds that the plan would save in this step


# A drafted token that a step may compute: minus the probability that it is right and used (so slots sort by it), the
# order of its draft among the drafts, and the tokens before it in its draft. Plain tuples: a step may have a hundred.
_Slot = tuple[float, int, int]
_Chance = tuple[
    float, float
]  # the probability that a draft's token is right, and its request's yield: `Acceptance`


class Control(Protocol):
    """Decides how long drafts are."""

    def length(
        self, drafter: str, requests: Sequence[Request], n_rows: int, n_max: int, n_steps: int = 1
    ) -> int:
        """The tokens of drafts for which a drafter that takes time is asked; 0: none pay. `n_steps`: since this was
        asked before.
        """
        ...

    def allot(self, drafts: Mapping[Request, Draft], n_rows: int, room: int) -> Drafts:
        """The drafts, shortened to what pays and to `room` tokens. `n_rows`: of the step without drafts."""
        ...

    def is_ready(self, n_rows: int) -> bool:
        """Whether it knows what a step of `n_rows`, without drafts, costs; if not, there are no drafts."""
        ...

    def is_worth_waiting(self, drafts: Mapping[Request, Draft], n_rows: int, room: int) -> bool:
        """Whether the step after the next tokens should wait for them, as it is likely to have drafts that pay.

        `drafts`: begin with the tokens that are being computed. `n_rows`: of the step without drafts.
        """
        ...

    def note_draft(self, request: Request, draft: Draft, n_right: int, is_rejected: bool) -> None: ...

    def note_step(
        self, n_rows: int, seconds: float, *, is_late: bool = False, n_requests: int = 0, most_rows: int = 1
    ) -> None:
        """Records what a step took. `is_late`: a device that is mostly given its steps in advance had to wait.
        `n_requests`: in the step (0: one for each row). `most_rows`: of a request.
        """
        ...

    def note_plan(self, n_rows: int, seconds: float, *, n_requests: int = 0, most_rows: int = 1) -> None:
        """Records that a step made a plan, and took `seconds`."""
        ...

    def add_plan(self, n_rows: int, *, n_requests: int = 0, most_rows: int = 1) -> None:
        """Records that there is a plan for such steps, made outside of a step."""
        ...

    def note_drafting(self, drafter: str, n_rounds: int, seconds: float) -> None: ...


class AdaptiveControl:
    """Maximizes the expected tokens per second, from measured costs and acceptance."""

    def __init__(
        self,
        priors: dict[str, tuple[float, ...]],
        preparation: Preparation = by_rows,
        plan_seconds: float = 0.0,
        computed: Callable[[int], int] = lambda n_rows: n_rows,
    ) -> None:
        """`preparation`: what is made for a step; equal values are one plan. `plan_seconds`: of a plan; 0.0: unknown,
        so the first one is made to find out. `computed`: the rows that are computed, by the rows of a step.
        """
        self.costs = StepCosts(computed)
        self._late = StepCosts(computed)  # of steps for which a device had to wait
        self._plans = PlanAccount(preparation, plan_seconds)
        self._is_priced = plan_seconds > 0
        self.acceptance = Acceptance(priors)
        self._costly: set[str] = set()  # drafters that take time
        self._rounds = {drafter: RoundCosts() for drafter in priors}

    def length(
        self, drafter: str, requests: Sequence[Request], n_rows: int, n_max: int, n_steps: int = 1
    ) -> int:
        if not self.costs.is_known(n_rows):
            return 0  # a step without drafts tells
        rates = [self.acceptance.rate(request, drafter, 0) for request in requests]
        base, *costs = self.costs.seconds_from(n_rows, 1 + n_max, len(rates))
        per_round = self._rounds[drafter].seconds(_ROUND * self.costs.seconds(1))
        n_min = min(request.speculation.draft_min for request in requests)
        best, n_best = n_rows / base * _MIN_GAIN, 0
        n_tokens, survival = float(n_rows), [1.0] * len(rates)
        for n, seconds in enumerate(costs, start=1):
            survival = [s * rate for s, rate in zip(survival, rates, strict=True)]
            n_tokens += sum(survival)
            gain = n_tokens / (seconds + n * per_round)
            if gain > best and n >= n_min:
                best, n_best = gain, n
        if n_best:
            self._costly.add(drafter)
        else:
            self._rounds[drafter].note_unused(n_steps)
            for request in requests:
                self.acceptance.decay(request, Draft((), drafter), n_steps)
        return n_best

    def allot(self, drafts: Mapping[Request, Draft], n_rows: int, room: int) -> Drafts:
        if not self.costs.is_known(n_rows):
            return {}  # a step without drafts tells
        chances = self._chances(drafts, n_rows)
        if not self._can_pay(drafts, chances, n_rows):
            for request, draft in drafts.items():
                self.acceptance.watch(request, draft)
            return {}
        slots = _slots(drafts, chances)[:room]
        is_paid = any(
            draft.drafter in self._costly for draft in drafts.values()
        )  # then plans are made as well
        best = self._best(slots, n_rows, _n_min(drafts), may_plan=is_paid)
        if (
            best.n_tokens and best.n_wanted
        ):  # these are used, so how much longer they could have been is not seen
            self._plans.credit(best.gain)
        requests = list(drafts)
        lengths, wanted = (_lengths(slots[:n], requests) for n in (best.n_tokens, best.n_wanted))
        return self._cut(drafts, lengths, wanted)

    def is_ready(self, n_rows: int) -> bool:
        return self.costs.is_known(n_rows)

    def is_worth_waiting(self, drafts: Mapping[Request, Draft], n_rows: int, room: int) -> bool:
        chances = [(rate, 1.0) for rate, _ in self._chances(drafts, n_rows)]
        best = _Best(0)
        if self._can_pay(drafts, chances, n_rows):
            slots = _slots(drafts, chances)[:room]
            best = self._best(slots, n_rows, _n_min(drafts), may_plan=False)
            # If the tokens that are being computed are not the drafts' first ones, the step waits for nothing.
            p_first, base = max(rate for rate, _ in chances), self.costs.seconds(n_rows)
            n_tokens = n_rows + p_first * _expected(slots[: best.n_tokens])
            longer = self.costs.seconds(n_rows + best.n_tokens) - base
            seconds = base + p_first * longer + self._late_seconds(n_rows)
            if n_tokens / seconds > n_rows / base * _MIN_GAIN:
                return True
        per_draft = -(-best.n_wanted // len(drafts))
        for request, draft in drafts.items():
            self.acceptance.watch(request, draft, min(per_draft, len(draft.tokens)))
        return False

    def _chances(self, drafts: Mapping[Request, Draft], n_rows: int) -> list[_Chance]:
        """For each draft the probability that a token is right, 0.0 if more has to be known before one is used, and
        its request's yield.
        """
        chances, acceptance = [], self.acceptance
        for request, draft in drafts.items():
            unused = acceptance.check_watched(request)
            if unused is not None and unused.n_wanted:
                base = self.costs.seconds(n_rows)
                n_gained = min(unused.n_right, unused.n_wanted)
                lost = self.costs.seconds(n_rows + unused.n_wanted) - base + self._late_seconds(n_rows)
                self._plans.credit(n_gained * base / n_rows - lost)
            chances.append(acceptance.chance(request, draft.drafter, draft.grade))
        return chances

    def _can_pay(self, drafts: Mapping[Request, Draft], chances: Sequence[_Chance], n_rows: int) -> bool:
        """Whether any part of the drafts may pay. A quick look, as mostly none does: all their tokens together must be
        worth one row, and the likeliest of them the cheapest row.
        """
        likeliest = max([rate * ratio for rate, ratio in chances])
        if likeliest < self.costs.row_price(n_rows, _MIN_GAIN):
            return False
        n_expected = 0.0
        for draft, (rate, ratio) in zip(drafts.values(), chances, strict=True):
            n_expected += ratio * rate * (1 - rate ** len(draft.tokens)) / (1 - rate)
        longer = self.costs.seconds(n_rows + 1) / self.costs.seconds(n_rows)
        return n_rows + n_expected >= n_rows * longer * _MIN_GAIN

    def _late_seconds(self, n_rows: int) -> float:
        """The seconds that a device loses if it does not get its next step in advance; 0.0 if it never does."""
        base = self.costs.seconds(n_rows)
        if self._late.is_known(n_rows):
            return max(0.0, self._late.seconds(n_rows) - base)
        return _WAIT_COST * base if self._late.n_steps else 0.0

    def _best(self, slots: Sequence[_Slot], n_rows: int, n_min: int, *, may_plan: bool) -> _Best:
        """How many drafted tokens make tokens come fastest, of tokens in descending order of survival.

        `n_min`: shorter drafts are not used.
        """
        base = self.costs.seconds(n_rows)
        least = n_rows / base * _MIN_GAIN
        n_tokens, max_tokens = float(n_rows), n_rows + _expected(slots)
        most_rows = 1
        # Numbers of tokens that pay: minus tokens per second, tokens, the most rows of a request, seconds.
        paying: list[tuple[float, int, int, float]] = []
        costs = self.costs.seconds_from(n_rows + 1, len(slots))
        for n, ((minus_survival, _, n_before), seconds) in enumerate(zip(slots, costs, strict=True), start=1):
            needed = least * seconds
            if max_tokens <= needed:
                break  # more rows take no less time
            n_tokens -= minus_survival
            if n_before + 2 > most_rows:
                most_rows = n_before + 2
            if n_tokens > needed and n_before + 1 >= n_min:
                paying.append((-n_tokens / seconds, n, most_rows, seconds))
        if not paying:
            return _Best(0)
        fastest = min(paying)
        n_best = fastest[1]
        if may_plan or self._plans.has(n_rows + n_best, n_rows, fastest[2]):
            return _Best(n_best)  # nearly always it has a plan
        if self._plans.is_enough:
            return _Best(n_best)
        planned = [each for each in paying if self._plans.has(n_rows + each[1], n_rows, each[2])]
        if not planned:
            return _Best(0, n_best, _saved(fastest, base / n_rows))
        saved = _saved(fastest, base / n_rows) - _saved(min(planned), base / n_rows)
        return _Best(min(planned)[1], n_best, saved)

    def _cut(
        self, drafts: Mapping[Request, Draft], lengths: Mapping[Request, int], wanted: Mapping[Request, int]
    ) -> Drafts:
        kept: Drafts = {}
        for request, draft in drafts.items():
            n = lengths.get(request, 0)
            if n >= max(1, request.speculation.draft_min):
                kept[request] = draft.cut(n)
            else:
                self.acceptance.watch(request, draft, wanted.get(request, 0))
        return kept

    def note_draft(self, request: Request, draft: Draft, n_right: int, is_rejected: bool) -> None:
        self.acceptance.note(request, draft, n_right, is_rejected)

    def note_step(
        self, n_rows: int, seconds: float, *, is_late: bool = False, n_requests: int = 0, most_rows: int = 1
    ) -> None:
        if self._is_priced and not self._plans.has(n_rows, n_requests, most_rows):
            self._plans.note(n_rows, seconds, n_requests, most_rows)  # kernels were launched one by one
            return
        if is_late:
            self._late.note(n_rows, seconds)
        if not is_late or not self.costs.is_known(n_rows):
            self.costs.note(n_rows, seconds)
        if not self._is_priced:
            self._plans.add(n_rows, n_requests, most_rows)

    def note_plan(self, n_rows: int, seconds: float, *, n_requests: int = 0, most_rows: int = 1) -> None:
        self._plans.note(n_rows, seconds, n_requests, most_rows)

    def add_plan(self, n_rows: int, *, n_requests: int = 0, most_rows: int = 1) -> None:
        self._plans.add(n_rows, n_requests, most_rows)

    def note_drafting(self, drafter: str, n_rounds: int, seconds: float) -> None:
        self._rounds[drafter].note(seconds / n_rounds)


def _n_min(drafts: Mapping[Request, Draft]) -> int:
    """The fewest tokens of a draft: the same for all requests of an engine."""
    return max(request.speculation.draft_min for request in drafts)


def _survivals(draft: Draft, rate: float, n_min: int) -> list[float]:
    """For each token the probability that it is right and used. The first `n_min` tokens come together or not at all,
    so they share theirs equally.

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
        if survival < _MIN_SURVIVAL and len(survivals) >= n_min:
            break
        survivals.append(survival)
    if n_min > 1 and survivals:
        first = survivals[:n_min]
        survivals[:n_min] = [sum(first) / len(first)] * len(first)
    return survivals


def _slots(drafts: Mapping[Request, Draft], chances: Sequence[_Chance]) -> list[_Slot]:
    """All drafted tokens, the likeliest to survive first."""
    slots: list[_Slot] = []
    for order, ((request, draft), (rate, ratio)) in enumerate(zip(drafts.items(), chances, strict=True)):
        survivals = _survivals(draft, rate, request.speculation.draft_min)
        slots += [(-survival * ratio, order, n_before) for n_before, survival in enumerate(survivals)]
    if len(drafts) > 1:
        slots.sort()
    return slots


def _saved(paying: tuple[float, int, int, float], per_token: float) -> float:
    """The seconds that a step saves, of those that its tokens take without drafts. `paying`: as in `_best`."""
    minus_rate, _, _, seconds = paying
    return -minus_rate * seconds * per_token - seconds


def _expected(slots: Sequence[_Slot]) -> float:
    """How many of the slots' tokens are expected to be right and used."""
    return -sum([minus_survival for minus_survival, _, _ in slots])


def _lengths(slots: Sequence[_Slot], requests: Sequence[Request]) -> dict[Request, int]:
    """How many of the slots each request has."""
    lengths: dict[Request, int] = {}
    for _, order, _ in slots:
        request = requests[order]
        lengths[request] = lengths.get(request, 0) + 1
    return lengths


class FixedControl:
    """Uses all drafted tokens for which there is room: for measurements and tests."""

    def length(
        self, drafter: str, requests: Sequence[Request], n_rows: int, n_max: int, n_steps: int = 1
    ) -> int:
        return n_max

    def allot(self, drafts: Mapping[Request, Draft], n_rows: int, room: int) -> Drafts:
        kept: Drafts = {}
        for request, draft in drafts.items():
            if draft.tokens and room > 0:
                kept[request] = own = draft.cut(room)
                room -= len(own.tokens)
        return kept

    def is_ready(self, n_rows: int) -> bool:
        return True

    def is_worth_waiting(self, drafts: Mapping[Request, Draft], n_rows: int, room: int) -> bool:
        return True

    def note_draft(self, request: Request, draft: Draft, n_right: int, is_rejected: bool) -> None:
        pass

    def note_step(
        self, n_rows: int, seconds: float, *, is_late: bool = False, n_requests: int = 0, most_rows: int = 1
    ) -> None:
        pass

    def note_plan(self, n_rows: int, seconds: float, *, n_requests: int = 0, most_rows: int = 1) -> None:
        pass

    def add_plan(self, n_rows: int, *, n_requests: int = 0, most_rows: int = 1) -> None:
        pass

    def note_drafting(self, drafter: str, n_rounds: int, seconds: float) -> None:
        pass
