"""The engine: requests in, tokens out, one step at a time. One thread drives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from motley.engine.bare import BareSequence
from motley.engine.params import SamplingParams
from motley.engine.request import CANCELLED, ContextShift, Request, TextStream
from motley.engine.sampling import Candidates, build_sampler, shortlist
from motley.engine.scheduler import Scheduler, Step
from motley.errors import MotleyError, RequestError
from motley.kvcache.manager import CacheManager
from motley.runtime import Batch, Chunk, PlacedBatch, Runner
from motley.text import Tokenizer


class _Planned(NamedTuple):
    """A step, and where its tokens go."""

    step: Step
    batch: PlacedBatch


class Engine:
    """A model that serves many requests at once."""

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
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._scheduler = Scheduler(cache, n_batch=n_batch, n_parallel=n_parallel)
        self._cache = cache
        self._n_ctx = n_ctx
        self._n_fit = cache.longest_fit(n_ctx, n_batch)  # tokens that one sequence may have
        self._n_vocab = n_vocab
        self._ahead: _Planned | None = None  # what will run next, unless something happens before
        self._is_closed = False

    def add(self, prompt: Sequence[int], params: SamplingParams, *, continues_prompt: bool = True) -> Request:
        """Queue a request. RequestError or CacheError if it can never be served.

        `continues_prompt`: the answer's text goes on where the prompt's ends, so its first space counts.
        """
        self._check_tokens(prompt)
        self._check_tokens([0, *params.logit_bias], "logit_bias")
        if len(prompt) >= self._n_ctx:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self._n_ctx} and an answer needs room",
                hint="shorten the prompt or raise the context size (-c / n_ctx)",
            )
        request = Request(
            prompt=tuple(prompt),
            sampler=build_sampler(params),
            text=TextStream(self._tokenizer, prompt if continues_prompt else (), params.stop),
            stop_ids=params.stop_token_ids | (frozenset() if params.ignore_eos else self._tokenizer.eog_ids),
            max_tokens=self._max_tokens(len(prompt), params),
            shift=self._context_shift(len(prompt), params) if params.context_shift else None,
        )
        self._scheduler.add(request)
        return request

    def step(self) -> None:
        """Advance all running requests by one pass through the model."""
        if self._is_closed:
            raise RequestError("the model was closed")
        if shifts := self._scheduler.shift_full():
            self._runner.shift(shifts)
        step, batch = self._plan()
        with self._all_or_nothing(step):
            logits = self._runner.run(batch, step.tokens(), step.copies)
            self._scheduler.complete(step)
            self._ahead = self._foresee()  # a GPU is still at work
            ready = [request for request, _ in step.work if not request.n_pending]
            lists = shortlist(logits, [r.sampler for r in ready], [r.tokens for r in ready])
        self._accept(ready, lists)
        self._give_back()

    def cancel(self, request: Request) -> None:
        if not request.is_finished:
            self._scheduler.remove(request)
            request.finish(CANCELLED)
            if not self._is_closed:
                self._give_back()

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 (tokens, vocab): row i predicts what follows token i. Nothing is taken from the prefix cache."""
        self._check_length(tokens)
        with self.bare_sequence() as sequence:
            return sequence.feed(tokens)

    @contextmanager
    def computed(self, tokens: Sequence[int]) -> Iterator[int]:
        """A sequence whose cache has all of `tokens`; what the prefix cache knows of them is not computed again."""
        self._check_length(tokens)
        opened, n_batch = self._cache.open(tokens), self._scheduler.n_batch
        sequence, copies = opened.seq, opened.copies
        try:
            for start in range(opened.n_cached, len(tokens), n_batch):
                part = tuple(tokens[start : start + n_batch])
                self._cache.advance(sequence, start)
                room = self._cache.reserve(sequence, len(part))
                if room is None:
                    raise RequestError(
                        f"no room in the KV cache for {len(tokens)} tokens beside running requests"
                    )
                batch = Batch.of([Chunk(sequence, start, len(part), 0)])
                self._runner.run(self._runner.place(batch, self._cache), part, [*copies, *room])
                self._cache.commit(sequence, part)
                copies = []
            yield sequence
        finally:
            self._cache.free(sequence)
            self._give_back()

    def bare_sequence(self) -> BareSequence:
        """A sequence to be fed by hand. Requests cannot be served beside it if it takes their room."""
        return BareSequence(self._runner, self._cache, self._scheduler.n_batch, self._n_vocab)

    def close(self) -> None:
        """Cancel all requests; later steps are errors."""
        self._is_closed = True
        for request in self._scheduler.requests:
            self._scheduler.remove(request)
            request.fail(RequestError("the model was closed"))

    def _plan(self) -> _Planned:
        """What runs next: as it was foreseen, if that has come true."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._scheduler.is_next(ahead.step):
            return ahead
        step = self._scheduler.schedule()
        with self._all_or_nothing(step):
            return _Planned(step, self._place(step))

    @contextmanager
    def _all_or_nothing(self, step: Step) -> Iterator[None]:
        """What fails midway is computed again, from the beginning."""
        try:
            yield
        except BaseException:
            self._ahead = None
            self._scheduler.abandon(step)
            raise

    def _foresee(self) -> _Planned | None:
        """What will probably run after the step that has just begun, while its tokens are being made."""
        step = self._scheduler.foresee()
        return None if step is None else _Planned(step, self._place(step))

    def _place(self, step: Step) -> PlacedBatch:
        chunks = []
        for request, n_tokens in step.work:
            assert request.sequence is not None
            start, end = request.n_computed, request.n_computed + n_tokens
            chunks.append(Chunk(request.sequence, start, n_tokens, int(end >= len(request.tokens))))
        return self._runner.place(Batch.of(chunks), self._cache)

    def _accept(self, ready: Sequence[Request], lists: Sequence[Candidates]) -> None:
        """Each request, all of whose tokens are computed, gets one more, from its list."""
        for request, found in zip(ready, lists, strict=True):
            try:
                request.accept(request.sampler.pick(found))
            except MotleyError as error:  # its own fault; the others go on
                request.fail(error)
            if request.is_finished:
                self._scheduler.remove(request)

    def _give_back(self) -> None:
        """Return the memory of blocks that hold nothing any more, where it is demand-paged."""
        self._runner.give_back(self._cache.take_emptied())

    def _max_tokens(self, n_prompt: int, params: SamplingParams) -> int | None:
        """How long the answer may become. Who names no number takes what the context and the cache hold."""
        if params.context_shift:
            return params.max_tokens
        if params.max_tokens is None:
            return max(1, self._n_fit - n_prompt)
        return min(params.max_tokens, self._n_ctx - n_prompt)

    def _context_shift(self, n_prompt: int, params: SamplingParams) -> ContextShift:
        self._runner.require_shift()
        n_keep = n_prompt if params.n_keep == -1 else params.n_keep
        n_ctx = max(self._n_fit, n_prompt + 1)  # a prompt that does not fit is refused by the cache
        if n_ctx - n_keep < 2:
            raise RequestError(
                f"{n_keep} tokens are to be kept, but the context holds {n_ctx}: nothing is left to drop",
                hint="lower n_keep (--keep), or raise the context size (-c / n_ctx) or the cache's limit",
            )
        return ContextShift(n_ctx, n_keep)

    def _check_length(self, tokens: Sequence[int]) -> None:
        """Whether these tokens, and no answer, fit into the context and the cache."""
        self._check_tokens(tokens)
        if len(tokens) > self._n_ctx:
            raise RequestError(
                f"{len(tokens)} tokens do not fit into a context of {self._n_ctx}", hint="raise n_ctx (-c)"
            )
        self._cache.require_fit(len(tokens), self._scheduler.n_batch)

    def _check_tokens(self, tokens: Sequence[int], where: str = "the prompt") -> None:
        if not tokens:
            raise RequestError(f"{where} is empty", hint="give at least one token")
        for token in tokens:
            if not 0 <= token < self._n_vocab:
                raise RequestError(
                    f"token id {token} in {where} is outside the vocabulary of {self._n_vocab}"
                )
