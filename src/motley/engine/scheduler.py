"""The scheduler: which requests run in the next step, and with how many tokens. Imports no torch.

There is no prefill and no decode phase: a request has pending tokens (its prompt, then one at a time), and a step takes
some of them from each request, up to `n_batch` in all:

1. requests with few pending tokens, which get their next token in this step;
2. prompts, the oldest first. Beside (1) they take no more tokens than `Pace` allows. A prompt that cannot be finished
   in this step leaves half of the room to other prompts, shortest first, so that short prompts do not wait for it;
3. waiting requests, in the order of their arrival, while there is room for them in the step and in the cache.

Requests that run the same layers share a step (`Effort.n_layers`); where there are several depths they take turns.

A request that waits for its next token may have a draft: tokens that are likely to follow. They are computed in the
same step, after its pending token, if the step and the cache have room for all of them. They are committed to the cache
one by one, once they are known to be right (`confirm`).

When the cache is full the youngest running request is preempted: its blocks are freed, its tokens are kept, and it is
computed again when there is room.

After a step has failed, its requests are *suspects*: each runs alone until it has got its next token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from motley.engine.pacing import Pace
from motley.engine.request import Request
from motley.engine.trees import Parents
from motley.kvcache.groups import BlockCopy, BlockShift
from motley.kvcache.manager import CacheManager

_FEW = 16  # pending tokens: less than a prompt

Drafts = Mapping[Request, tuple[int, ...]]
Trees = Mapping[Request, Parents]  # the parents of drafts that are trees


@dataclass
class Step:
    """One pass through the model: for each request, how many of its pending tokens are computed, its draft included."""

    work: list[tuple[Request, int]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    n_tokens: int = 0
    drafts: dict[Request, tuple[int, ...]] = field(default_factory=dict)  # computed after the pending token
    trees: dict[Request, Parents] = field(default_factory=dict)  # of drafts that are trees

    def add(
        self,
        request: Request,
        n_tokens: int,
        copies: Iterable[BlockCopy],
        draft: tuple[int, ...] = (),
        parents: Parents = (),
    ) -> None:
        """Adds `n_tokens` pending tokens of a request, and its draft."""
        self.work.append((request, n_tokens + len(draft)))
        self.copies.extend(copies)
        self.n_tokens += n_tokens + len(draft)
        if draft:
            self.drafts[request] = draft
        if parents:
            self.trees[request] = parents

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self.work]

    @property
    def is_decoding(self) -> bool:
        """Whether it has one token of each request, which waits for its next one, and its draft, and copies nothing."""
        n_drafted = sum(map(len, self.drafts.values())) if self.drafts else 0
        return len(self.work) + n_drafted == self.n_tokens and not self.copies

    def without_drafts(self) -> Step:
        """The same step with the requests' own tokens only."""
        work = [(request, n - self.n_drafted(request)) for request, n in self.work]
        return Step(work, self.copies, sum(n for _, n in work))

    def n_drafted(self, request: Request) -> int:
        """How many of the request's tokens in this step are its draft."""
        return len(self.drafts[request]) if request in self.drafts else 0

    def tokens(self) -> list[int]:
        """All tokens that the step computes, in the order of `work`. Only valid before `Scheduler.complete`."""
        tokens: list[int] = []
        for request, n in self.work:
            n_pending = n - self.n_drafted(request)
            tokens += request.tokens[request.n_computed : request.n_computed + n_pending]
            tokens += self.drafts.get(request, ())
        return tokens

    def drop(self, request: Request) -> None:
        self.work = [(other, n) for other, n in self.work if other is not request]
        self.drafts.pop(request, None)
        self.trees.pop(request, None)
        self.n_tokens = sum(n for _, n in self.work)


class Scheduler:
    """Continuous batching over a cache that may be full. Engine thread only."""

    def __init__(
        self, cache: CacheManager, *, n_batch: int, n_parallel: int, pace: Pace | None = None
    ) -> None:
        self.cache = cache
        self.n_batch = n_batch
        self.n_parallel = n_parallel
        self.max_rows: int | None = None  # of a step, while kernels for larger ones are being compiled
        self.pace = pace or Pace()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self._touched: dict[Request, None] = {}  # an ordered set: requests whose cache this step changed
        self._suspects: deque[Request] = deque()
        self._refused: tuple[Request, int] | None = None  # (request, free tokens) when it had no room
        self._served: dict[int, int] = {}  # number of layers → the latest step that ran them
        self._n_steps = 0

    @property
    def step_tokens(self) -> int:
        """Tokens that a step may have at present."""
        return self.n_batch if self.max_rows is None else min(self.n_batch, self.max_rows)

    @property
    def max_running(self) -> int:
        """Requests that may run at present."""
        return self.n_parallel if self.max_rows is None else min(self.n_parallel, self.max_rows)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def n_suspects(self) -> int:
        return len(self._suspects)

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def add(self, request: Request) -> None:
        """Queues a request. CacheError if it could not finish even alone."""
        self.cache.require_fit(request.max_cached_tokens, self.n_batch)
        self.waiting.append(request)

    def begin(self, planned: Step | None = None) -> None:
        """Starts a step: `planned`, or one to be scheduled. From here on `abandon` undoes its changes."""
        self._touched = {} if planned is None else dict.fromkeys(planned.requests)

    def touch(self, requests: Iterable[Request]) -> None:
        """Records that the step changes the cache of these requests."""
        self._touched |= dict.fromkeys(requests)

    def shift_full(self) -> list[BlockShift]:
        """Drops tokens of requests whose context is full. Returns the shifts, which the caller must perform at once.

        Half of the tokens after the kept ones are dropped, the oldest first. If the cache cannot be shifted, the
        remaining tokens of the request are computed again.
        """
        shifts: list[BlockShift] = []
        for request in [request for request in self.running if request.is_full]:
            assert request.sequence is not None
            self._touched[request] = None
            # As before a step with the latest token only. A step with drafts began earlier, so that windows have more
            # tokens left, and what they have decides whether tokens are moved or computed again.
            self.cache.advance(request.sequence, request.n_computed - 1)
            n_keep, n_drop = _dropped(request)
            moved = self.cache.shift(request.sequence, n_keep, n_drop)
            request.drop(n_keep, n_drop)
            if moved is None:
                self._suspend(request)
            else:
                shifts.extend(moved)
        return shifts

    def schedule(self, drafts: Drafts | None = None, trees: Trees | None = None) -> Step:
        """The next step, with its slots reserved. A step without work means that no request has room in the cache."""
        step = Step()
        drafts, trees = drafts or {}, trees or {}
        while self._suspects and self._suspects[0] not in self.requests:
            self._suspects.popleft()  # this suspect was cancelled
        if self._suspects:
            self._schedule_alone(step, self._suspects[0])
            return step
        self._n_steps += 1
        for depth in self._depths():
            self._schedule_depth(step, depth, drafts, trees)
            if step.work:
                self._served[depth] = self._n_steps
                break
        return step

    def _depths(self) -> list[int]:
        """The numbers of layers of all requests; the one whose latest step is longest ago comes first."""
        has_room = self.waiting and len(self.running) < self.max_running
        first_waiting = [self.waiting[0]] if has_room else []
        depths = dict.fromkeys(r.effort.n_layers for r in (*self.running, *first_waiting))
        return sorted(depths, key=lambda depth: self._served.get(depth, 0))

    def _schedule_depth(self, step: Step, depth: int, drafts: Drafts, trees: Trees) -> None:
        for request in [r for r in self.running if r.effort.n_layers == depth]:
            if request.n_pending <= _FEW and request in self.running:  # not preempted meanwhile
                draft, parents = drafts.get(request, ()), trees.get(request, ())
                self._extend(step, request, self.step_tokens - step.n_tokens, draft, parents)
        self._schedule_prompts(step, depth)

    def _schedule_prompts(self, step: Step, depth: int) -> None:
        room = self.step_tokens - step.n_tokens
        if step.work:
            room = min(room, self.pace.max_prompt_tokens())
        scheduled = {request for request, _ in step.work}
        prompts = [r for r in self.running if r not in scheduled and r.effort.n_layers == depth]
        if prompts:
            oldest, *others = prompts
            n_newcomers = max(0, self.max_running - len(self.running))
            newcomers = [request for _, request in zip(range(n_newcomers), self.waiting, strict=False)]
            n_wanted = sum(request.n_pending for request in (*others, *newcomers))
            share = room if oldest.n_pending <= room else max(-(-room // 2), room - n_wanted)
            room -= self._extend(step, oldest, share)
            for request in sorted(others, key=lambda r: r.n_pending):
                if request in self.running:
                    room -= self._extend(step, request, room)
        while self.waiting and len(self.running) < self.max_running and room > 0:
            if self.waiting[0].effort.n_layers != depth:
                break
            n_tokens = self._admit(step, self.waiting[0], room)
            if not n_tokens:
                break
            room -= n_tokens

    def _schedule_alone(self, step: Step, request: Request) -> None:
        """Adds only this request to the step. Preempts the others if it needs their blocks."""
        if request in self.running:
            self.running.remove(request)
            self.running.insert(0, request)  # as the oldest: the youngest is preempted first
            self._extend(step, request, self.step_tokens)
            return
        while not self._admit(step, request, self.step_tokens) and self.running:
            self._preempt(step, self.running[-1])

    def plan_ahead(self, *, is_uncertain: bool = False) -> Step | None:
        """The look-ahead plan: the next step if each request of the current step gets one token and no request changes.

        Reserves its slots; if the plan is not used, the next schedule uses them. None if the assumption is certainly
        wrong, or if blocks would have to be copied. `is_uncertain`: the step may run although a request has already
        ended; recurrent states then include all tokens but the step's own.
        """
        if is_uncertain and not self.cache.max_uncertain:
            return None
        if self.waiting or self._suspects or len(self.running) > self.step_tokens:
            return None
        if any(request.n_pending or not request.continues for request in self.running):
            return None
        if len({request.effort.n_layers for request in self.running}) > 1:
            return None
        step = Step()
        for request in self.running:
            assert request.sequence is not None
            self._touched[request] = None
            self.cache.advance(request.sequence, request.n_computed)
            n_uncertain = int(is_uncertain)
            if self.cache.reserve(request.sequence, 1, n_uncertain=n_uncertain, may_copy=False) is None:
                return None
            step.add(request, 1, ())
        return step

    def is_decoding(self, requests: Sequence[Request]) -> bool:
        """Whether these are all that run, and no other request could start now."""
        return (
            self.running == requests
            and not self._suspects
            and (not self.waiting or len(self.running) >= self.max_running)
        )

    def note_begun(self, step: Step) -> None:
        """Records that a step was launched whose tokens are not known yet."""
        for request, _ in step.work:
            assert request.sequence is not None
            self.cache.note_begun(request.sequence)

    def is_next(self, planned: Step) -> bool:
        """Whether `planned` is still valid: the assumptions of `plan_ahead` hold."""
        return (
            not self.waiting
            and not self._suspects
            and self.running == [request for request, _ in planned.work]
            and all(request.n_pending == 1 for request in self.running)
        )

    def complete(self, step: Step) -> None:
        """Records that the step has run: its tokens' K/V are in the cache."""
        for request, n_tokens in step.work:
            assert request.sequence is not None
            self._touched[request] = None
            n_known = n_tokens - step.n_drafted(request)
            done = request.tokens[request.n_computed : request.n_computed + n_known]
            self.cache.commit(request.sequence, done)
            request.n_computed += n_known

    def confirm(self, request: Request, n_tokens: int = 1) -> None:
        """Records that the request's next tokens were right in its draft: their K/V are in the cache."""
        assert request.sequence is not None
        assert 0 < n_tokens <= request.n_pending, (n_tokens, request.n_pending)
        start = request.n_computed
        self.cache.commit(request.sequence, request.tokens[start : start + n_tokens])
        request.n_computed += n_tokens

    def move(self, request: Request, rows: Sequence[int]) -> list[BlockShift]:
        """Moves of K/V of rows of the request's tree to the slots after its last token in the cache, in their order.

        `rows`: of the step, from the request's next token on; the caller must carry the moves out before `confirm`.
        """
        assert request.sequence is not None
        start, first = request.n_computed, request.n_computed - request.n_matched  # of row 0
        pairs = [(first + row, start + i) for i, row in enumerate(rows) if first + row != start + i]
        return self.cache.move(request.sequence, *zip(*pairs, strict=True)) if pairs else []

    def room_for_drafts(self) -> int:
        """How many drafted tokens the next step may have, in all. Half of the room is left to prompts, if any wait.

        0 while `max_rows` limits steps: a draft model's samplers are not compiled yet, either.
        """
        if self._suspects or self.max_rows is not None:
            return 0
        n_few, has_prompts = 0, bool(self.waiting)
        for request in self.running:
            n_pending = len(request.tokens) - request.n_computed
            if n_pending <= _FEW:
                n_few += n_pending
            else:
                has_prompts = True
        return max(0, self.step_tokens - n_few) // (2 if has_prompts else 1)

    def clear(self, request: Request) -> None:
        """Removes a request from the suspects, because it has got its next token."""
        if self._suspects and self._suspects[0] is request:
            self._suspects.popleft()

    def abandon(self) -> Request | None:
        """Undoes a failed step: the requests that it changed become suspects. Returns a suspect that ran alone.

        Copies and shifts of the step may not have been made, so blocks that were incomplete before are not published,
        nor are states, which the step may have changed.
        """
        touched = [request for request in self._touched if not request.is_finished]
        for request in reversed(touched):
            self._suspend(request, copies_done=False)
        if self._suspects:
            return self._suspects[0]
        self._suspects.extend(touched or self.requests[:1])  # it may have failed before any change
        for request in self._suspects:
            request.n_retries += 1
        return None

    def restart(self) -> None:
        """Suspends all requests, as all K/V is lost. They free their blocks and wait in the order of admission."""
        for request in reversed([r for r in self.requests if r.sequence is not None]):
            self._suspend(request, copies_done=False)
        for request in self.requests:
            request.prefix_keys.clear()
        self._touched = {}
        self._refused = None

    def preempt(self) -> bool:
        """Preempts the youngest running request, between two steps. False: none is running."""
        if self.running:
            self.begin()
            self._preempt(Step(), self.running[-1])
            return True
        return False

    def remove(self, request: Request) -> None:
        """Removes a request, running or waiting."""
        self._release(request)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self._suspects:
            self._suspects.remove(request)

    def _extend(
        self,
        step: Step,
        request: Request,
        room: int,
        draft: tuple[int, ...] = (),
        parents: Parents = (),
    ) -> int:
        """Adds up to `room` pending tokens of a running request to the step, and returns how many. Preempts younger
        requests if blocks are missing. The draft is added if there is room for it without that.
        """
        assert request.sequence is not None
        n_tokens = min(request.n_pending, room)
        if n_tokens <= 0:
            return 0
        self._touched[request] = None
        n_tokens = self.cache.n_before_checkpoint(request.sequence, n_tokens)
        self.cache.advance(request.sequence, request.n_computed)
        draft, parents = draft[: self.cache.max_uncertain], parents[: self.cache.max_uncertain]
        if draft and n_tokens == request.n_pending and n_tokens + len(draft) <= room:
            n_drafted = len(draft)
            copies = self.cache.reserve(request.sequence, n_tokens + n_drafted, n_uncertain=n_drafted)
            if copies is not None:
                step.add(request, n_tokens, copies, draft, parents)
                return n_tokens + len(draft)
        while (copies := self.cache.reserve(request.sequence, n_tokens)) is None:
            youngest = self.running[-1]
            self._preempt(step, youngest)
            if youngest is request:
                return 0
        step.add(request, n_tokens, copies)
        return n_tokens

    def _admit(self, step: Step, request: Request, room: int) -> int:
        """Starts a waiting request if its next chunk has room in the cache, and returns the number of tokens; 0: no
        room. Never preempts a running request.
        """
        if self._refused is not None and self.running:
            refused, n_free = self._refused
            if refused is request and self.cache.n_free_tokens <= n_free:
                return 0
        self._touched[request] = None
        opened = self.cache.open(
            request.tokens,
            salt=request.salt,
            keys=request.prefix_keys,
            find=request.cache_prompt,
            checkpoints=request.checkpoints,
        )
        request.sequence, request.n_computed = opened.seq, opened.n_cached
        n_tokens = self.cache.n_before_checkpoint(opened.seq, min(request.n_pending, room))
        self.cache.advance(opened.seq, opened.n_cached)
        copies = self.cache.reserve(opened.seq, n_tokens)
        if copies is None:
            self.cache.reject(opened)
            request.sequence, request.n_computed = None, 0
            self._refused = request, self.cache.n_free_tokens
            return 0
        if not request.started:
            request.started = time.perf_counter()
            request.n_cached = opened.n_cached
        step.add(request, n_tokens, (*opened.copies, *copies))
        self.waiting.remove(request)
        self.running.append(request)
        return n_tokens

    def _preempt(self, step: Step, request: Request) -> None:
        step.drop(request)
        request.n_preemptions += 1
        self._suspend(request, copies_done=request not in self._touched)

    def _suspend(self, request: Request, *, copies_done: bool = True) -> None:
        """Frees a request's blocks and puts it at the front of the queue."""
        self._release(request, copies_done=copies_done)
        if request.is_full:  # it would be computed with more tokens than its context holds
            request.drop(*_dropped(request))
            request.n_computed = 0
        if request in self.running:
            self.running.remove(request)
        if request not in self.waiting:
            self.waiting.appendleft(request)

    def _release(self, request: Request, *, copies_done: bool = True) -> None:
        sequence, request.sequence, request.n_computed = request.sequence, None, 0
        if sequence is not None:
            self.cache.free(sequence, copies_done=copies_done)


def _dropped(request: Request) -> tuple[int, int]:
    """The tokens that a full context keeps, and how many after them it drops: half of the rest."""
    assert request.shift is not None
    n_keep = request.shift.n_keep
    return n_keep, (len(request.tokens) - n_keep) // 2
