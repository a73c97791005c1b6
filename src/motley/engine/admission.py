"""Admission: from a prompt and its parameters to a request, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence

from motley.engine.drafting import Speculator
from motley.engine.effort import Efforts
from motley.engine.params import SamplingParams
from motley.engine.request import ContextShift, Request, TextStream
from motley.engine.samplers import SamplerFactory
from motley.errors import RequestError
from motley.grammar import GrammarCompiler, Matcher
from motley.kvcache.manager import CacheManager
from motley.text import Tokenizer


class Admission:
    """Makes requests of one model. Any thread may call its methods."""

    def __init__(
        self, tokenizer: Tokenizer, cache: CacheManager, *, n_ctx: int, n_vocab: int, n_batch: int
    ) -> None:
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer)
        self._samplers = SamplerFactory(tokenizer)
        self._cache = cache
        self._n_ctx, self._n_vocab, self._n_batch = n_ctx, n_vocab, n_batch
        self._n_fit = cache.longest_fit(n_ctx, n_batch)  # the most tokens of one sequence

    def new_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        efforts: Efforts,
        speculator: Speculator,
        *,
        continues_prompt: bool,
        leader: Request | None,
        shows_special: bool,
    ) -> Request:
        """See `Engine.new_request`."""
        self.check_tokens(prompt)
        self.check_tokens([0, *params.logit_bias], "logit_bias")
        if len(prompt) >= self._n_ctx:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self._n_ctx} and an answer needs room",
                hint="shorten the prompt or raise the context size (-c / n_ctx)",
            )
        matcher = self._matcher(params)
        effort = efforts.choose(params.n_expert_used, params.n_layer_exit)
        ends = frozenset() if params.ignore_eos and matcher is None else self._tokenizer.eog_ids
        request = Request(
            prompt=tuple(prompt),
            sampler=self._samplers.make(params),
            text=TextStream(
                self._tokenizer,
                prompt if continues_prompt else (),
                params.stop,
                shows_special=shows_special,
            ),
            # Others never come, and native calls could not take all of them.
            stop_ids=frozenset(token for token in params.stop_token_ids | ends if token < self._n_vocab),
            max_tokens=self._max_tokens(len(prompt), params),
            shift=self._context_shift(len(prompt), params) if params.context_shift else None,
            effort=effort,
            checkpoints=self._checkpoints(prompt),
            matcher=matcher,
            min_tokens=params.min_tokens,
            max_seconds=params.max_seconds,
            cache_prompt=params.cache_prompt,
            cache_salt=params.cache_salt,
            leader=leader if params.cache_prompt and self._cache.finds_prefixes else None,
            logprobs=None if params.logprobs is None else [],
            speculation=speculator.choose(
                params.speculative,
                params.draft_max,
                is_constrained=matcher is not None,
                n_layers=effort.n_layers,
            ),
        )
        self._cache.require_fit(request.max_cached_tokens, self._n_batch)
        speculator.prepare(request)
        return request

    def _checkpoints(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The position from which the next prompt of a chat can differ from this one: after the last complete message.

        After it comes the beginning of an answer. Templates change answers later: they remove the reasoning.
        """
        ends = self._tokenizer.eog_ids
        last = next((i for i in range(len(prompt) - 1, -1, -1) if prompt[i] in ends), None)
        return () if last is None else (last + 1,)

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        """A matcher for what the answer must match. Compiles its grammar, in the caller's thread."""
        constraint = params.constraint()
        return None if constraint is None else self._grammars.matcher(constraint)

    def check_length(self, tokens: Sequence[int]) -> None:
        """Raises if the tokens do not fit into the context and the cache, even without an answer."""
        self.check_tokens(tokens)
        if len(tokens) > self._n_ctx:
            raise RequestError(
                f"{len(tokens)} tokens do not fit into a context of {self._n_ctx}", hint="raise n_ctx (-c)"
            )
        self._cache.require_fit(len(tokens), self._n_batch)

    def check_tokens(self, tokens: Sequence[int], where: str = "the prompt") -> None:
        if not tokens:
            raise RequestError(f"{where} is empty", hint="give at least one token")
        for token in tokens:
            if not 0 <= token < self._n_vocab:
                raise RequestError(
                    f"token id {token} in {where} is outside the vocabulary of {self._n_vocab}"
                )

    def _max_tokens(self, n_prompt: int, params: SamplingParams) -> int | None:
        """The most tokens of the answer. Default: what fits into the context and the cache."""
        if params.context_shift:
            return params.max_tokens
        if params.max_tokens is None:
            return max(1, self._n_fit - n_prompt)
        return min(params.max_tokens, self._n_ctx - n_prompt)

    def _context_shift(self, n_prompt: int, params: SamplingParams) -> ContextShift:
        n_keep = n_prompt if params.n_keep == -1 else params.n_keep
        n_ctx = max(self._n_fit, n_prompt + 1)  # the cache refuses a prompt that does not fit
        if n_ctx - n_keep < 2:
            raise RequestError(
                f"{n_keep} tokens are to be kept, but the context holds {n_ctx}: nothing is left to drop",
                hint="lower n_keep (--keep), or raise the context size (-c / n_ctx) or the cache's limit",
            )
        return ContextShift(n_ctx, n_keep)
