"""The speculator: asks drafters for drafts of the running requests, and learns from what became of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from motley.engine.drafting.choice import read_choice
from motley.engine.drafting.control import AdaptiveControl, Control
from motley.engine.drafting.costs import Preparation, by_rows
from motley.engine.drafting.draft import (
    CacheOwner,
    Draft,
    Drafter,
    DraftRequest,
    LayerDrafter,
    LearningDrafter,
    TreeDrafter,
    Watcher,
)
from motley.engine.drafting.forced import Forced
from motley.engine.drafting.lookup import ONLY_LOOKUP, Lookup
from motley.engine.drafting.pace import Pace
from motley.engine.request import Request, Speculation
from motley.engine.scheduler import Scheduler
from motley.engine.trees import MAX_ROWS, Parents
from motley.errors import RequestError

_log = logging.getLogger("motley")
_MAX_ROWS = 64  # of logits in a step
# Unused drafts, one after the other: after more than so many → tokens until the next draft is looked at.
_PAUSES = ((12, 16), (4, 8), (1, 4))
_LONG_MATCH = 2  # grade of a looked up draft that is looked at in any case
_ANY_NUMBER = 1 << 30
_MAX_REQUESTS = 32  # with more, a step has rows enough, and looking for drafts takes longer than they save


class Speculator:
    """Drafts for all requests. Without drafters, it never has any. Only `choose` and `prepare` may be called from any
    thread.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter] = (),
        *,
        spec: str = "off",
        draft_max: int = 15,
        draft_min: int = 0,
        n_vocab: int = 0,
        max_rows: int = _MAX_ROWS,
        preparation: Preparation = by_rows,
        plan_seconds: float = 0.0,
        computed: Callable[[int], int] = lambda n_rows: n_rows,
        control: Control | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`spec`, `draft_max`, `draft_min`: for requests that do not say. `max_rows`: rows of logits in one step.
        `preparation`: what is made for a step; equal values are one plan. `plan_seconds`: of a plan; 0.0: unknown.
        `computed`: the rows that are computed, by the rows of a step.
        """
        # Free drafters are asked first.
        self._drafters = sorted(drafters, key=lambda drafter: not drafter.is_free)
        self.names = tuple(drafter.name for drafter in self._drafters)
        priors = {drafter.name: drafter.priors for drafter in drafters}
        self._control = control or AdaptiveControl(priors, preparation, plan_seconds, computed)
        self._learners = {each.name: each for each in drafters if isinstance(each, LearningDrafter)}
        self._watchers = {each.name: each for each in drafters if isinstance(each, Watcher)}
        self._cache_owners = [each for each in drafters if isinstance(each, CacheOwner)]
        self._lookup = next((each for each in drafters if isinstance(each, Lookup)), None)
        self._exit = next((each for each in drafters if isinstance(each, LayerDrafter)), None)
        self._trees = {each.name for each in drafters if isinstance(each, TreeDrafter) and each.has_trees}
        self._costly = frozenset(drafter.name for drafter in drafters if not drafter.is_free)
        self._n_vocab = n_vocab
        self._max_rows = max_rows
        self._clock = clock
        self._pace = Pace()  # of drafters that take time
        self._paced: list[Request] = []  # the requests of the latest step for which it counted
        self._refusals: list[
            bool
        ] = []  # of this step, by drafter that takes time: whether its drafts do not pay
        self.n_quiet = 0  # how many steps after the next one need no drafts
        self._drafting_seconds = 0.0  # that drafters took for the step that is being planned
        self.default = Speculation(read_choice(spec, self.names), draft_max, draft_min)

    def choose(
        self,
        spec: str | None = None,
        draft_max: int | None = None,
        *,
        is_constrained: bool = True,
        n_layers: int = 0,
    ) -> Speculation:
        """The speculation of a request (None: the default). RequestError for a drafter that is not there, and for what
        would leave the request without drafts. `n_layers`: that the request uses; 0: all.
        """
        default = self.default
        drafters = default.drafters if spec is None else read_choice(spec, self.names)
        if not is_constrained:  # no grammar forces anything
            drafters = tuple(name for name in drafters if name != Forced.name)
        if self._exit is not None and self._exit.name in drafters and 0 < n_layers <= self._exit.n_layers:
            if spec is not None:
                raise RequestError(
                    f"speculation {spec!r:.60} is not possible with n_layer_exit={n_layers}: drafts are computed "
                    f"by the first {self._exit.n_layers} layers",
                    hint=f"an n_layer_exit above {self._exit.n_layers}, other drafters, or fewer layers for drafts "
                    "(--draft-layers)",
                )
            drafters = tuple(name for name in drafters if name != self._exit.name)
        if drafters and draft_max and draft_max < default.draft_min:
            raise RequestError(
                f"draft_max={draft_max} is not possible: drafts have at least {default.draft_min} tokens",
                hint=f"a draft_max of {default.draft_min} or more, speculative='off', or a lower --draft-min",
            )
        return Speculation(drafters, draft_max or default.draft_max, default.draft_min)

    def prepare(self, request: Request) -> None:
        """Does what drafters would otherwise do in the request's first step. To be called before it is queued."""
        lookup = self._lookup
        if lookup is not None and lookup.name in request.speculation.drafters:
            try:
                lookup.prepare(request)
            except Exception:
                _log.warning("a prompt was not indexed when its request was made", exc_info=True)

    def propose(self, scheduler: Scheduler) -> dict[Request, Draft]:
        """Drafts for requests that wait for their next token, as long as they make tokens come faster."""
        running = scheduler.running
        self._drafting_seconds = 0.0
        if self._watchers:
            for watcher in tuple(self._watchers.values()):
                self._catch_up(watcher, running)
        if not self._drafters or len(running) > _MAX_REQUESTS:
            self.n_quiet = _ANY_NUMBER
            return {}
        # This runs in every step, mostly without a result: requests without drafts must cost a few microseconds only.
        looked_up = self._find(self._lookup, running) if self._lookup is not None and running else None
        if looked_up is not None and self._lookup is not None:
            drafts = self._allot_found(scheduler, looked_up) if looked_up else {}
            self.n_quiet = self._lookup.n_pause
            return drafts
        is_paced = any(not self._costly.isdisjoint(request.speculation.drafters) for request in running)
        resting = self._begin_step(running) if is_paced else frozenset()
        self._refusals.clear()
        asking = []
        names: set[str] = set()
        for request in running:
            own = request.speculation
            if (
                own.drafters
                and len(request.generated) >= request.drafts_from
                and len(request.tokens) == request.n_computed + 1
            ):
                n_max = request.max_draft
                if n_max and n_max >= own.draft_min:
                    asking.append(DraftRequest(request, n_max))
                    names.update(own.drafters)
        found: dict[Request, Draft] = {}
        for drafter in self._drafters:
            name = drafter.name
            if name not in names or name in resting:
                continue
            asks = [
                ask for ask in asking if name in ask.request.speculation.drafters and ask.request not in found
            ]
            if asks:
                found |= self._request_drafts(scheduler, drafter, asks)
        if is_paced and self._costly.isdisjoint(resting) and not (self._refusals and all(self._refusals)):
            self._pace.note_use()
        drafts = found
        if found:
            drafts = self._control.allot(found, _n_rows(scheduler), self._room(scheduler))
        for request, *_ in asking:
            if request in found or request.speculation.drafters != ONLY_LOOKUP:
                self._set_pause(request, request in drafts)
        self.n_quiet = min((self._n_quiet(request, is_paced) for request in running), default=_ANY_NUMBER)
        return drafts

    def _begin_step(self, requests: Sequence[Request]) -> frozenset[str]:
        """Counts a step with requests whose drafters take time. Returns the drafters that are not asked in it: while
        drafts that take time do not pay, these are looked for less often, and texts are looked up at their own pace.
        """
        lookup = self._lookup
        if requests != self._paced:
            self._paced = list(requests)
            self._pace.note_use()
            if lookup is not None:
                lookup.note_use()
        is_looked_up = lookup is None or lookup.is_due()
        if self._pace.is_due():
            return frozenset()
        return self._costly if is_looked_up else self._costly | {Lookup.name}

    def _n_quiet(self, request: Request, is_paced: bool) -> int:
        """How many steps after the next one need no drafts of a request."""
        drafters = request.speculation.drafters
        if not drafters:
            return _ANY_NUMBER
        n_looked_up = self._lookup.n_pause if is_paced and self._lookup is not None else 0
        if drafters == ONLY_LOOKUP:
            return n_looked_up
        if self._costly.isdisjoint(drafters):
            return max(0, request.drafts_from - len(request.generated) - 1)
        if not self._costly.issuperset(name for name in drafters if name != Lookup.name):
            return 0
        return min(self._pace.n_pause, n_looked_up) if Lookup.name in drafters else self._pace.n_pause

    def pass_over(self, n_steps: int) -> None:
        """So many steps come without a call of `propose`."""
        if n_steps:
            self._pace.pass_over(n_steps)
            if self._lookup is not None:
                self._lookup.pass_over(n_steps)

    def _find(self, lookup: Lookup, running: Sequence[Request]) -> dict[Request, Draft] | None:
        try:
            return lookup.find(running)
        except BaseException as error:
            self._leave_out(lookup.name, error)
            return None

    def _allot_found(self, scheduler: Scheduler, found: Mapping[Request, Draft]) -> dict[Request, Draft]:
        """The drafts that pay, of those that were looked up."""
        usable = {
            request: draft
            for request, draft in found.items()
            if (len(request.generated) >= request.drafts_from or draft.grade >= _LONG_MATCH)
            and len(request.tokens) == request.n_computed + 1
            and len(draft.tokens) >= request.speculation.draft_min
        }
        if not usable:
            return {}
        drafts = self._control.allot(usable, _n_rows(scheduler), self._room(scheduler))
        for request in usable:
            self._set_pause(request, request in drafts)
        return drafts

    def _set_pause(self, request: Request, is_used: bool) -> None:
        """Sets a pause after which drafts of a request are looked at again, if its text cannot be guessed. A look-up
        without a result takes little time, and does not count.
        """
        request.n_unused_drafts = 0 if is_used else request.n_unused_drafts + 1
        if self._costly.isdisjoint(request.speculation.drafters):
            pause = next((pause for n, pause in _PAUSES if request.n_unused_drafts > n), 0)
            request.drafts_from = request.n_generated + pause if pause else request.drafts_from

    def give_back(self) -> None:
        """Releases the memory of empty blocks of drafters' own caches, which are demand-paged."""
        for owner in self._cache_owners:
            owner.give_back()

    def forget(self, tokens: Sequence[int], salt: bytes) -> None:
        """Drops what drafters' own caches have of these tokens. `salt`: as for `CacheManager.open`."""
        for owner in self._cache_owners:
            owner.forget(tokens, salt)

    @property
    def has_watchers(self) -> bool:
        """Whether a drafter may need hidden states."""
        return bool(self._watchers)

    def watches(self, request: Request) -> bool:
        """Whether a drafter needs the hidden states of the request's tokens."""
        return any(name in request.speculation.drafters for name in self._watchers)

    def observe(
        self, rows: Sequence[tuple[Request, int, int]], hidden: Any, trees: Mapping[Request, Parents]
    ) -> None:
        """Takes hidden states of a step. `rows`: requests, the position of their first token, their tokens.

        Of a tree only the rows before it are taken: the others are not at successive positions.
        """
        first = 0
        for request, start, n_tokens in rows:
            n_taken = n_tokens - len(trees.get(request, ()))
            for name, watcher in tuple(self._watchers.items()):
                if name in request.speculation.drafters:
                    try:
                        watcher.observe(request, start, hidden[first : first + n_taken])
                    except BaseException as error:
                        self._leave_out(name, error)
            first += n_tokens

    def learns(self, drafter: str) -> bool:
        """Whether a drafter learns from all rows of its drafts."""
        return drafter in self._learners

    def learns_from(self, drafts: Mapping[Request, Draft]) -> bool:
        """Whether a drafter learns from all rows of one of these drafts."""
        return bool(self._learners) and any(draft.drafter in self._learners for draft in drafts.values())

    def learn(self, request: Request, draft: Draft, outputs: Sequence[int]) -> None:
        """Tells a drafter the likeliest tokens after a request's last token and after each token of its draft."""
        try:
            self._learners[draft.drafter].learn(request, draft, outputs)
        except BaseException as error:
            self._leave_out(draft.drafter, error)

    def _catch_up(self, watcher: Watcher, requests: Sequence[Request]) -> None:
        try:
            watcher.catch_up(requests)
        except BaseException as error:
            self._leave_out(watcher.name, error)

    def _leave_out(self, name: str, error: BaseException) -> None:
        """Goes on without a drafter that has failed."""
        self._drafters = [other for other in self._drafters if other.name != name]
        self._lookup = None if name == Lookup.name else self._lookup
        self._costly -= {name}
        self._watchers.pop(name, None)
        self._learners.pop(name, None)
        _log.warning("drafter %s failed and is not used any more", name, exc_info=error)

    def _room(self, scheduler: Scheduler) -> int:
        """How many drafted tokens the next step may have, in all."""
        # With prompts that end in this step.
        n_outputs = min(len(scheduler.running) + len(scheduler.waiting), scheduler.max_running)
        return max(0, min(scheduler.room_for_drafts(), self._max_rows - n_outputs))

    def may_draft(self, requests: Sequence[Request]) -> bool:
        """Whether the step after the requests' next tokens is likely to have drafts that pay: then it has to wait for
        these tokens. Called while they are computed.
        """
        if not self._drafters or not requests or len(requests) > _MAX_REQUESTS:
            return False
        if not self._control.is_ready(len(requests)):
            return False
        for drafter in self._drafters:
            own = [r for r in requests if drafter.name in r.speculation.drafters and r.max_draft > 1]
            try:
                if own and self._is_likely(drafter, own, len(requests)):
                    return True
            except BaseException as error:
                self._leave_out(drafter.name, error)
        return False

    def _is_likely(self, drafter: Drafter, own: Sequence[Request], n_rows: int) -> bool:
        """Whether a drafter is likely to have drafts that pay after the next tokens of `own`."""
        if drafter is self._lookup:
            found = zip(own, drafter.draft([DraftRequest(r, r.max_draft) for r in own]), strict=True)
            drafts = {request: draft for request, draft in found if draft.tokens}
            is_likely = bool(drafts) and self._control.is_worth_waiting(drafts, n_rows, self._max_rows)
            if is_likely:
                drafter.note_use()
            return is_likely
        if not any(map(drafter.may_draft, own)):
            return False
        n_max = max(request.max_draft for request in own)
        if drafter.is_free:
            return True
        is_likely = self._control.length(drafter.name, own, n_rows, n_max) > 0
        if is_likely:
            self._pace.note_use()
        return is_likely

    def note_draft(self, request: Request, draft: Draft, n_right: int, is_rejected: bool) -> None:
        """Records how many tokens of a draft were right, and whether one was wrong."""
        if n_right and self._lookup is not None and draft.drafter == self._lookup.name:
            self._lookup.note_use()
        self._control.note_draft(request, draft, n_right, is_rejected)

    def take_drafting_seconds(self) -> float:
        """The seconds that drafters took for the present step; 0.0 when it is asked again. They are a price of their
        own (`Control.note_drafting`), not a part of what the step's rows cost.
        """
        seconds, self._drafting_seconds = self._drafting_seconds, 0.0
        return seconds

    def note_step(
        self, n_rows: int, seconds: float, *, is_late: bool = False, n_requests: int = 0, most_rows: int = 1
    ) -> None:
        """Records that a step of `n_rows`, all of requests that wait for a token, took `seconds`. `is_late`: a device
        that is mostly given its steps in advance had to wait for it. `n_requests`: in the step (0: one for each row).
        `most_rows`: of a request.
        """
        self._control.note_step(n_rows, seconds, is_late=is_late, n_requests=n_requests, most_rows=most_rows)

    def note_plan(self, n_rows: int, seconds: float, *, n_requests: int = 0, most_rows: int = 1) -> None:
        """Records that a step of `n_rows` made a plan, and took `seconds`."""
        self._control.note_plan(n_rows, seconds, n_requests=n_requests, most_rows=most_rows)

    def add_plan(self, n_rows: int, *, n_requests: int = 0, most_rows: int = 1) -> None:
        """Records that there is a plan for such steps, made outside of a step."""
        self._control.add_plan(n_rows, n_requests=n_requests, most_rows=most_rows)

    def _request_drafts(
        self, scheduler: Scheduler, drafter: Drafter, asks: Sequence[DraftRequest]
    ) -> dict[Request, Draft]:
        if drafter.name in self._trees:
            max_rows = min(MAX_ROWS - 1, self._room(scheduler) // len(asks))
            asks = [ask._replace(max_rows=max_rows) for ask in asks]
        if not drafter.is_free:
            n_max = min(self._room(scheduler), max(ask.n_max for ask in asks))
            requests, n_rows = [ask.request for ask in asks], _n_rows(scheduler)
            can_have = n_max > 0 and self._control.is_ready(n_rows)
            n_max = n_max and self._control.length(
                drafter.name, requests, n_rows, n_max, self._pace.n_covered
            )
            self._refusals.append(can_have and not n_max)
            if not n_max:
                return {}
            asks = [DraftRequest(ask.request, min(ask.n_max, n_max)) for ask in asks]
        if drafter.writes_cache:
            scheduler.touch(ask.request for ask in asks)
        started = 0.0 if drafter.is_free else self._clock()
        try:
            found = drafter.draft(asks)
            assert len(found) == len(asks), "a draft for each request"
        except BaseException as error:
            self._leave_out(drafter.name, error)
            if drafter.writes_cache:
                raise
            return {}
        if not drafter.is_free:
            seconds = self._clock() - started
            self._drafting_seconds += seconds
            n_rounds = max(len(draft.tokens) for draft in found)
            if n_rounds and drafter.is_usual:
                self._control.note_drafting(drafter.name, n_rounds, seconds)
            # No draft, and none is being prepared: the context is beyond a draft model's, say.
            self._refusals[-1] = not n_rounds and drafter.is_usual
        kept = {}
        for (request, n, _), draft in zip(asks, found, strict=True):
            tokens = draft.tokens
            if not tokens:
                continue
            if len(tokens) > n or draft.parents or min(tokens) < 0 or max(tokens) >= self._n_vocab:
                n_valid = self._n_valid(tokens[: MAX_ROWS - 1] if draft.parents else tokens[:n])
                draft = draft.cut(n_valid, n)
            if len(draft.tokens) >= max(1, request.speculation.draft_min):
                kept[request] = draft
        return kept

    def _n_valid(self, tokens: tuple[int, ...]) -> int:
        """The number of tokens before the first that is not in the vocabulary."""
        for i, token in enumerate(tokens):
            if not 0 <= token < self._n_vocab:
                return i
        return len(tokens)


def _n_rows(scheduler: Scheduler) -> int:
    """The rows of requests that wait for their next token, in a step without drafts."""
    return sum(len(request.tokens) == request.n_computed + 1 for request in scheduler.running)
