"""The engine: requests in, tokens out, one step at a time. One thread drives it: see service.py."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from motley.engine.admission import Admission
from motley.engine.choosing import Chooser, Pending, TokenOrError, chooser_for, n_needed
from motley.engine.drafting import Draft, Speculator
from motley.engine.effort import Efforts
from motley.engine.params import SamplingParams
from motley.engine.request import CANCELLED, Request, TokenLogprobs
from motley.engine.scheduler import Scheduler, Step
from motley.engine.steady import Steady
from motley.engine.trees import row_masks
from motley.engine.verifying import NONE_CHOSEN, Chosen, DraftVerification, chosen_of, row_of
from motley.errors import (
    CacheError,
    DeviceError,
    FailedWorkerError,
    LostWorkerError,
    MotleyError,
    RequestError,
)
from motley.kvcache.manager import CacheManager
from motley.runtime import Batch, Chunk, PlacedBatch, Runner
from motley.text import Tokenizer

WAIT, FAIL = "wait", "fail"  # what happens to requests when a worker is lost
ON_LOSS = (WAIT, FAIL)
_log = logging.getLogger("motley")


class _Running(NamedTuple):
    """A step that was launched on a GPU before the host knew its tokens, and its logits."""

    step: Step
    logits: torch.Tensor
    n_runs: int  # of the runner, this run included


class _Planned(NamedTuple):
    """A scheduled step with its placed batch. None: it is placed when it runs, as no GPU computes meanwhile.

    `steady`: the same step, if it is one that is repeated.
    """

    step: Step
    batch: PlacedBatch | None = None
    steady: Steady | None = None


class Engine:
    """Serves many requests at once with one model. Only `new_request` and the checks may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        cache: CacheManager,
        tokenizer: Tokenizer,
        *,
        n_ctx: int,
        n_vocab: int,
        n_batch: int,
        n_parallel: int,
        efforts: Efforts | None = None,
        speculator: Speculator | None = None,
        on_loss: str = WAIT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.scheduler = Scheduler(cache, n_batch=n_batch, n_parallel=n_parallel)
        self.n_vocab = n_vocab
        self.efforts = efforts or Efforts(n_layers=1)
        self.after_turn: Callable[[], object] = lambda: None  # called after each turn: messages, then a step
        self.idle_tasks: deque[Callable[[], object]] = deque()  # to be done while there is nothing else to do
        self.may_idle = False  # before the first step, another thread may drive the engine: a benchmark
        self._tasks_after_limit: list[
            Callable[[], object]
        ] = []  # idle tasks that need kernels of large steps
        self.wait_for_kernels: Callable[[], object] = lambda: None  # until steps have no limit; by any thread
        self.speculator = speculator or Speculator()
        self.n_internal = 0  # raw sequences that Motley itself ends: requests wait for their blocks
        self._followers: list[Request] = []  # wait for their leader's first token
        self._admission = Admission(tokenizer, cache, n_ctx=n_ctx, n_vocab=n_vocab, n_batch=n_batch)
        self._clock = clock
        self._chooser: Chooser | None = None  # created when the device of the logits is known
        self._ahead: _Planned | None = None  # the look-ahead plan, valid if no request changes
        self._running: _Running | None = None  # the step that is already launched
        self._steady: Steady | None = None  # a step that is repeated while no request comes or goes
        self._first_error: BaseException | None = None  # of the last failed step, if it had a single request
        self._drafts: dict[Request, Draft] = {}  # of the step that is being computed
        self._verification: DraftVerification | None = None  # of these drafts, once the step is computed
        self._is_blocked = False  # in the latest step, no request had room in the cache
        self._is_late = (
            False  # whether a GPU had to wait for the latest step, which was not launched in advance
        )
        self.on_loss = on_loss
        self.wake: Callable[[], object] = self.resume  # any thread calls it when lost workers are back
        self.report_loss: Callable[[MotleyError], object] = self.lose_crew  # any thread calls it
        self.n_losses = 0  # how often workers were lost: all K/V was lost with them
        self.loss: MotleyError | None = None  # why no step can run at present

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._followers)

    @property
    def can_step(self) -> bool:
        """Whether a step would make progress: there are requests, and they do not wait for a raw sequence to end, nor
        for a lost worker.
        """
        return self.has_work and not (self._is_blocked and self.n_internal) and self.loss is None

    def new_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        continues_prompt: bool = True,
        leader: Request | None = None,
        shows_special: bool = False,
    ) -> Request:
        """A new request, not queued. RequestError or CacheError if it can never be served. Any thread may call this.

        `continues_prompt`: the answer continues the prompt's text, so a leading space of the answer is kept.
        `leader`: a request with the same prompt; this one starts after its first token, and the prompt is a prefix hit.
        `shows_special`: control tokens appear in the answer's text.
        """
        return self._admission.new_request(
            prompt,
            params,
            self.efforts,
            self.speculator,
            continues_prompt=continues_prompt,
            leader=leader,
            shows_special=shows_special,
        )

    def check_length(self, tokens: Sequence[int]) -> None:
        """Raises if the tokens do not fit into the context and the cache, even without an answer."""
        self._admission.check_length(tokens)

    def check_tokens(self, tokens: Sequence[int], where: str = "the prompt") -> None:
        self._admission.check_tokens(tokens, where)

    def queue(self, request: Request) -> None:
        """Queues a request. It fails if it needs context shift and the model's keys cannot be rotated, and if a worker
        is lost that no request waits for.
        """
        try:
            if self.loss is not None and self.on_loss == FAIL:
                raise self.loss
            if request.shift is not None:
                self.runner.require_shift()
            if request.waits_for_leader:
                self._followers.append(request)
            else:
                self.scheduler.add(request)
        except MotleyError as error:
            request.fail(error)

    def add(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Creates a request, queues it and returns it."""
        request = self.new_request(prompt, params)
        self.queue(request)
        return request

    def step(self, seconds: float = 0.0) -> None:
        """Advances the running requests by one pass through the model, or by several that are the same if these take
        no longer than `seconds`. Raises only for bugs in Motley.

        If a step fails, each of its requests is computed again, alone. A request that fails alone ends with the error.
        """
        self._queue_followers()
        started, n_plans = self._clock(), self.runner.n_plans
        try:
            step, ready, chosen = self._compute(seconds)
        except BaseException as error:
            self._recover(error)
        else:
            steady = self._steady if self._steady is not None and self._steady.step is step else None
            n_rounds = 1 if steady is None else steady.n_computed
            self.scheduler.pace.note(step.n_tokens, (self._clock() - started) / n_rounds)
            self._accept(ready, *chosen)
            if step.drafts:
                self._follow_drafts()
            elif steady is not None:
                self._follow_rounds(steady)
            took = (self._clock() - started) / n_rounds
            if steady is not None:
                steady.seconds = took
            self._note_time(step, len(ready), took - self.speculator.take_drafting_seconds(), n_plans)
        self.give_back()

    def _note_time(self, step: Step, n_ready: int, seconds: float, n_plans: int) -> None:
        """Tells the speculator what a step took, drafting excepted, if all its rows are those of requests that got a
        token.
        """
        drafted = [len(draft) for draft in step.drafts.values()] if step.drafts else ()
        n_rows = step.n_tokens
        if n_ready + sum(drafted) != n_rows or not n_rows:
            return
        most_rows = 1 + max(drafted, default=0)
        if self.runner.n_plans != n_plans:
            self.speculator.note_plan(n_rows, seconds, n_requests=n_ready, most_rows=most_rows)
        else:
            is_late = self._is_late and not drafted
            self.speculator.note_step(
                n_rows, seconds, is_late=is_late, n_requests=n_ready, most_rows=most_rows
            )

    def cancel(self, request: Request) -> None:
        """Ends a request, if it has not ended."""
        if not request.is_finished:
            self._remove(request)
            try:
                request.finish(CANCELLED)
            except BaseException as error:
                self._fail(request, error)
            self.give_back()

    def preempt(self) -> bool:
        """Preempts the youngest running request: its blocks are freed and it waits. False: none is running."""
        self._ahead = None
        return self.scheduler.preempt()

    def close(self, error: MotleyError) -> None:
        """Ends all requests with an error. Readers are told first: after a bug, what follows may fail."""
        self.idle_tasks.clear()
        requests = [*self.scheduler.requests, *self._followers]
        for request in requests:
            self._fail(request, error)
        for request in requests:
            self._remove(request)

    def run_idle_task(self) -> None:
        """Does the first idle task. One that fails is left out: what it prepares is then made when it is needed."""
        try:
            self.idle_tasks.popleft()()
        except BaseException:
            _log.warning("an idle task failed", exc_info=True)

    def plan_idle_tasks(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Tasks to be done while there is nothing else to do, once steps may have any number of rows."""
        (self.idle_tasks if self.scheduler.max_rows is None else self._tasks_after_limit).extend(tasks)

    def set_limit(self, max_rows: int | None) -> None:
        """Sets the rows that a step may have. None: any number, as kernels for all steps are compiled.

        While there is a limit, tokens are chosen on the host: a GPU's samplers are not compiled yet, either.
        """
        self.scheduler.max_rows = max_rows
        self._chooser = None
        if max_rows is not None:
            return
        self.idle_tasks.extend(self._tasks_after_limit)
        self._tasks_after_limit.clear()

    def give_back(self) -> None:
        """Releases the memory of empty blocks, if the cache is demand-paged."""
        if not self.runner.is_demand_paged:
            return
        try:
            self.runner.give_back(self.cache.take_emptied())
            self.speculator.give_back()
        except BaseException:
            _log.warning("memory of empty KV cache blocks was not given back", exc_info=True)

    def forget(self, tokens: Sequence[int], salt: bytes) -> None:
        """Drops the cached blocks of these tokens, also those of drafters. `salt`: as for `CacheManager.open`."""
        self.cache.unpublish(tokens, salt=salt)
        self.speculator.forget(tokens, salt)
        self.give_back()

    def _remove(self, request: Request) -> None:
        self._steady = None
        self.scheduler.remove(request)
        if request in self._followers:
            self._followers.remove(request)

    def _queue_followers(self) -> None:
        """Queues requests whose leader has got its first token, or has ended."""
        if not self._followers:
            return
        leaders = set(self.scheduler.requests)
        waiting = [r for r in self._followers if r.waits_for_leader and r.leader in leaders]
        ready = [request for request in self._followers if request not in waiting]
        self._followers = waiting
        for request in ready:
            request.leader = None
            self.queue(request)

    # One step

    def _compute(self, seconds: float) -> tuple[Step, list[Request], Chosen]:
        """Runs the next step. Returns it, the requests that get a token, and the first token of each."""
        running = self._take_running()
        self._is_late = running is None and self.runner.can_chain
        if running is None:
            step, batch, steady = self._plan()
            if not step.work:
                return step, [], NONE_CHOSEN
            if steady is not None:  # runs, completes and chooses; there is nothing to plan ahead
                return step, steady.requests, self._repeat(steady, step, seconds)
            batch = batch or self._place(step)
            logits = self.runner.run(batch, step.tokens(), step.copies)
            if self.runner.hidden is not None:
                rows = [(request, request.n_computed, n_tokens) for request, n_tokens in step.work]
                self.speculator.observe(rows, self.runner.hidden, step.trees)
        else:
            step, logits = running.step, running.logits
        self.scheduler.complete(step)
        ready = [request for request, _ in step.work if not request.n_pending]
        for request in ready:
            request.n_steps += 1
        if not ready:
            return step, [], NONE_CHOSEN
        if self._chooser is None:
            self._chooser = chooser_for(logits.device, on_host=self.scheduler.max_rows is not None)
        if step.drafts:
            self._verification = DraftVerification(step, ready, self._drafts)
            self._verification.begin(self._chooser, logits, self.speculator)
            return step, ready, self._verification.choose(ready)
        chosen = self._chooser.choose(logits, [row_of(r) for r in ready])
        chains = self._can_chain(chosen, ready)
        self._ahead = self._plan_ahead(is_computing=chosen.on_device is not None, is_uncertain=chains)
        if chains:
            self._begin_ahead(chosen, ready)
        return step, ready, chosen_of(chosen)

    def _repeat(self, steady: Steady, step: Step, seconds: float) -> Chosen:
        """Runs the steady step, with drafts or several times. Returns the first token of each request."""
        if step.drafts:
            tokens = steady.run_rows()
            self._verification = DraftVerification(step, steady.requests, self._drafts)
            self._verification.begin_chosen(tokens)
            return self._verification.choose(steady.requests)
        n_rounds = steady.n_rounds(seconds, 1 + self.speculator.n_quiet)
        self.speculator.pass_over(n_rounds - 1)
        return steady.run(n_rounds)

    def _follow_drafts(self) -> None:
        """Gives requests whose first token was the first of their draft their further tokens, position by position."""
        verification, self._verification = self._verification, None
        if verification is None:
            return  # no request got a token
        try:
            further = verification.further_tokens()
            for request, tokens in further or ():
                self._accept_further(request, tokens)
            while further is None and (requests := verification.advance(self.scheduler, self.runner)):
                self._accept(requests, *verification.choose(requests))
        except BaseException as error:
            self._recover(error)
        verification.finish(self.speculator)

    def _follow_rounds(self, steady: Steady) -> None:
        """Gives requests the tokens of the further rounds of a call. After one in which a request ends, the first one
        included, the rest is dropped: it is computed again, with the same result.
        """
        try:
            further = steady.further()
            while self._steady is steady and (tokens := next(further, None)):
                self._accept(steady.requests, tokens, {})
        except BaseException as error:
            self._recover(error)

    def _can_chain(self, chosen: Pending, ready: Sequence[Request]) -> bool:
        """Whether the next step may begin with tokens that only the GPU has yet.

        Not if a draft is likely: it needs the tokens, and may be worth more than the time that the host takes.
        """
        if chosen.on_device is None or not self.runner.can_chain:
            return False
        # Hidden states would have to be handed on before the next step writes over them.
        is_watched = self.speculator.has_watchers and any(map(self.speculator.watches, ready))
        return not is_watched and not self.speculator.may_draft(ready)

    def _begin_ahead(self, chosen: Pending, ready: Sequence[Request]) -> None:
        """Launches the look-ahead step with tokens that only the GPU has yet, so that it does not wait for the host."""
        ahead = self._ahead
        if ahead is None or ahead.batch is None or chosen.on_device is None:
            return
        if [request for request, _ in ahead.step.work] == list(ready):  # one row each, in the same order
            self._ahead = None
            logits = self.runner.run(ahead.batch, chosen.on_device, ())
            self.scheduler.note_begun(ahead.step)
            self._running = _Running(ahead.step, logits, self.runner.n_runs)

    def _take_running(self) -> _Running | None:
        """The step that is already launched, without the requests that have ended since; their results are dropped.

        Their blocks may have new owners already. That is safe: on the GPU the new owners' writes come after this step.
        """
        running, self._running = self._running, None
        if running is None or running.n_runs != self.runner.n_runs:
            return None  # a raw sequence has overwritten the logits since: compute the step again
        self.scheduler.begin(running.step)
        there = set(self.scheduler.running)
        rows = [i for i, (request, _) in enumerate(running.step.work) if request in there]
        if len(rows) == len(running.step.work):
            return running
        if not rows:
            return None
        left = Step()
        for row in rows:
            left.add(running.step.work[row][0], 1, ())
        return _Running(left, running.logits[rows], running.n_runs)

    def _plan(self) -> _Planned:
        """The next step: the latest one again, or the look-ahead plan, if that is still valid; else newly scheduled."""
        ahead, self._ahead = self._ahead, None
        steady = self._begin_steady()
        if steady is not None:
            ahead = None
        elif ahead is not None and self.scheduler.is_next(ahead.step):
            self.scheduler.begin(ahead.step)
        else:
            ahead = None
            self.scheduler.begin()
            if shifts := self.scheduler.shift_full():
                self.runner.shift(shifts)
        self._drafts = self.speculator.propose(self.scheduler)
        if steady is not None and (planned := self._repeated(steady)) is not None:
            return planned
        if ahead is not None and not self._drafts:
            return ahead if ahead.batch else self._repeatable(ahead.step)
        drafts = self._drafts.items()
        step = self.scheduler.schedule(
            {request: draft.tokens for request, draft in drafts},
            {request: draft.parents for request, draft in drafts if draft.parents},
        )
        self._is_blocked = not step.work
        if self._is_blocked and not self.n_internal:
            self._refuse_first()
        # A repeated step that does not take these drafts would not take them either if it were staged again.
        can_repeat = step.is_decoding and (steady is None or not step.drafts)
        return self._repeatable(step) if can_repeat else _Planned(step)

    def _begin_steady(self) -> Steady | None:
        """Begins the repeated step, if it is the next one and has room."""
        steady = self._steady
        if steady is None or not steady.is_next(self.scheduler):
            return None
        self.scheduler.begin(steady.step)
        return steady if steady.reserve(self.cache) else None

    def _repeated(self, steady: Steady) -> _Planned | None:
        """The repeated step, with this step's drafts. None: it has to be scheduled."""
        if not self._drafts:
            # Drafts that are not used may have reserved slots, and moved activations by a new plan.
            is_ready = steady.is_current and steady.reserve(self.cache)
            return _Planned(steady.step, None, steady) if is_ready else None
        if self.speculator.learns_from(self._drafts):
            return None
        step = steady.with_drafts(self._drafts, self.cache)
        return None if step is None else _Planned(step, None, steady)

    def _repeatable(self, step: Step) -> _Planned:
        """The step, staged so that it can be repeated, if the runner and the samplers of its requests allow that."""
        rows = [row_of(request) for request in step.requests]
        settings = None if self._chooser is None else self._chooser.settings(rows)
        if settings is None or (step.drafts and not self._can_repeat_drafts(step)):
            return _Planned(step)
        if any(request.n_pending > 1 for request in step.requests):  # a token of a longer prompt
            return _Planned(step)
        single = step.without_drafts() if step.drafts else step
        batch = self._place(single)
        run = self.runner.steady(batch, settings)
        if run is not None:
            steady = Steady(single, run)
            if steady.is_next(self.scheduler) and (planned := self._repeated(steady)) is not None:
                self._steady = steady
                return planned
        return _Planned(step, None if step.drafts else batch)

    def _can_repeat_drafts(self, step: Step) -> bool:
        """Whether all drafts that were proposed are in the step, and a repeated one can have such drafts."""
        is_whole = len(step.drafts) == len(self._drafts) and not step.trees
        return is_whole and self.runner.can_repeat and not self.speculator.learns_from(self._drafts)

    def _plan_ahead(self, *, is_computing: bool, is_uncertain: bool) -> _Planned | None:
        """The look-ahead plan: the step expected after the one that has just been launched. None: no plan.

        `is_computing`: a GPU is computing, so that there is time to place the step as well. `is_uncertain`: the step
        will be launched before its tokens are known.
        """
        step = self.scheduler.plan_ahead(is_uncertain=is_uncertain)
        return None if step is None else _Planned(step, self._place(step) if is_computing else None)

    def _place(self, step: Step) -> PlacedBatch:
        chunks = []
        for request, n_tokens in step.work:
            assert request.sequence is not None
            start, end = request.n_computed, request.n_computed + n_tokens
            n_drafted = step.n_drafted(request)
            is_last = end - n_drafted >= len(request.tokens)
            n_outputs = 1 + n_drafted if is_last else 0
            effort = request.effort
            chunk = Chunk(request.sequence, start, n_tokens, n_outputs, effort.n_experts, effort.n_layers)
            if request in step.trees:
                assert self.runner.refuses_trees is None, "a drafter made a tree where there are none"
                chunk = chunk._replace(seen=row_masks(step.trees[request], n_tokens - n_drafted))
            chunks.append(chunk)
        speculator = self.speculator
        keeps_hidden = speculator.has_watchers and any(
            speculator.watches(request) for request, _ in step.work
        )
        n_best = n_needed([row_of(request) for request, _ in step.work]) if self.runner.sends_rows else 0
        return self.runner.place(Batch.of(chunks, keeps_hidden=keeps_hidden, n_best=n_best), self.cache)

    def _accept(
        self, ready: Sequence[Request], tokens: Sequence[TokenOrError], logprobs: Mapping[int, TokenLogprobs]
    ) -> None:
        """Appends the chosen token to each request of `ready`; a request with an error instead of a token fails."""
        has_suspects = self.scheduler.n_suspects > 0
        for row, (request, token) in enumerate(zip(ready, tokens, strict=True)):
            if has_suspects:
                self.scheduler.clear(request)
            try:
                if isinstance(token, BaseException):
                    raise token
                request.accept(token, logprobs.get(row) if logprobs else None)
            except BaseException as error:  # an error of this request only
                self._fail(request, error)
            if request.finish_reason is not None:  # `is_finished`, in the engine's hottest loop
                self._steady = None
                self.scheduler.remove(request)

    def _accept_further(self, request: Request, tokens: Sequence[TokenOrError]) -> None:
        """Appends the tokens of a request's draft rows after the first, as long as those before them were right."""
        n_right = 0
        try:
            for token in tokens:
                n_right += 1  # the token before this one
                if isinstance(token, BaseException):
                    raise token
                request.accept(token)
                if request.is_finished or not request.draft:
                    break
        except BaseException as error:  # an error of this request only
            self._fail(request, error)
        try:
            self.scheduler.confirm(request, n_right)
        finally:
            if request.is_finished:
                self._steady = None
                self.scheduler.remove(request)

    def lose_crew(self, error: MotleyError) -> None:
        """Workers are lost, and all K/V with them. Requests wait and are computed again when the workers are back, or
        fail (`on_loss`). A crew may also be broken off because a device of this process has failed.

        If a worker has reported an error, the step that it belongs to has failed, as it would have in this process.
        """
        if self.loss is not None:
            return
        if isinstance(error, FailedWorkerError):
            self._abandon(error)
        self.n_losses += 1
        self.loss = error
        self._drop_plans()
        self.scheduler.restart()
        self.cache.invalidate()
        if self.on_loss == FAIL:
            self.close(error)
        else:
            _log.warning("%s; requests wait for it", error)
            self.runner.restore(self.wake)

    def lose_crew_if_broken(self, error: MotleyError) -> None:
        """The same as `lose_crew`, for a message that may be late: the crew may be complete again."""
        if self.runner.is_broken_off:
            self.lose_crew(error)

    def resume(self) -> None:
        """The lost workers are back."""
        if self.loss is not None:
            _log.warning("the crew is complete again")
        self.loss = None

    def require_no_loss(self, n_losses: int) -> None:
        """RequestError if workers were lost since there were `n_losses`: what was in the cache then is not there."""
        if self.n_losses != n_losses:
            raise RequestError(
                "a worker was lost, and the cache of this sequence with it", hint="begin again"
            )

    def _recover(self, error: BaseException) -> None:
        """Undoes a failed step."""
        if isinstance(error, LostWorkerError):
            self.lose_crew(error)
            return
        self._abandon(error)
        if self.runner.is_broken_off:
            self.lose_crew(as_motley_error(error))

    def _abandon(self, error: BaseException) -> None:
        """The requests of the failed step become suspects. One that failed alone, as a suspect, ends with the error."""
        self._drop_plans()
        failed = self.scheduler.abandon()
        if failed is None:
            # Of a single request, the next error may be but a consequence of this one.
            self._first_error = error if self.scheduler.n_suspects == 1 else None
        else:
            self.scheduler.remove(failed)
            self._fail(failed, self._first_error or error)

    def _drop_plans(self) -> None:
        """Forgets what was planned, launched or drafted: the step that it belongs to has failed."""
        if self._verification is not None:
            self._verification.abandon()
        self._ahead = self._running = self._steady = self._verification = None

    def _fail(self, request: Request, error: BaseException) -> None:
        if not request.is_finished:
            request.fail(as_motley_error(error))

    def _refuse_first(self) -> None:
        """Fails the first request: no request runs, and raw sequences hold the blocks that it needs."""
        request = self.scheduler.requests[0]
        self.scheduler.remove(request)
        request.fail(
            CacheError(
                "no request can run: sequences outside the queue hold the KV cache",
                hint="close raw sequences",
            )
        )


def as_motley_error(error: BaseException) -> MotleyError:
    """The error, wrapped as a MotleyError if it is not one."""
    if isinstance(error, MotleyError):
        return error
    if isinstance(error, MemoryError):
        ours: MotleyError = DeviceError(
            f"out of memory: {error}" if str(error) else "out of memory",
            hint="a smaller context, batch or KV cache",
        )
    else:
        ours = RequestError(f"the request failed: {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
