"""What the machine's part of speculation gives: drafts that are right with a given probability, at a depth of context.

    python -m benchmarks speculation --device cuda:0 --shape llama-8b --weights Q4_K --right 0.8 \\
        --depth 0,122880 --cache-type q8_0 --tokens 256 --rounds 3

Weights are random. Runs without drafts choose tokens as always, planned ahead where the device can; runs with drafts
choose as well, and then take the token of the run without, so that drafts are right as often as they should be. The
context is filled with random keys and values.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from motley import LLM
from motley.engine import Engine, Request, SamplingParams
from motley.engine.choosing import ChoiceRow, Chooser, Pending
from motley.engine.drafting import Draft, Speculator
from motley.engine.drafting.control import FixedControl
from motley.engine.drafting.draft import DraftRequest
from motley.engine.service import TURN_SECONDS


class Scripted(Chooser):
    """A chooser that chooses as always, and returns the next token of a written text instead, where there is one."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self.texts: dict[int, tuple[int, ...]] = {}  # by id of the request's sampler

    def choose(self, logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> Pending:
        pending = self._chooser.choose(logits, rows)
        if not any(id(row.sampler) in self.texts for row in rows):
            return pending

        def tokens() -> list[Any]:
            found = pending.tokens()
            return [
                self.texts[id(row.sampler)][row.index] if id(row.sampler) in self.texts else token
                for row, token in zip(rows, found, strict=True)
            ]

        return Pending(tokens)

    def settings(self, rows: Sequence[ChoiceRow]) -> list[Any] | None:
        """A native call chooses as always; see `benchmarks.speculation` for what becomes of its tokens."""
        return self._chooser.settings(rows)


class SometimesRight:
    """Drafts a written text; each token is right with a given probability."""

    name = "lookup"
    priors = (0.7,)
    is_free = True
    is_usual = True
    writes_cache = False

    def __init__(self, scripted: Scripted, p_right: float) -> None:
        self._scripted, self._p, self._rng = scripted, p_right, random.Random(0)

    def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(self._tokens(ask.request, ask.n_max), self.name) for ask in asks]

    def may_draft(self, request: Request) -> bool:
        return True

    def _tokens(self, request: Request, n: int) -> tuple[int, ...]:
        rest = self._scripted.texts[id(request.sampler)][request.n_generated :][:n]
        return tuple(token if self._rng.random() < self._p else token ^ 1 for token in rest)


def measure_depth(
    llm: LLM, scripted: Scripted, p_right: float, depth: int, *, n_tokens: int, n_rounds: int, n_requests: int
) -> dict[str, Any]:
    """Speed with drafts against without, of requests whose context has `depth` tokens; runs alternate."""
    engine = llm._loaded.engine
    _make_plans(engine, scripted, depth, n_requests)
    drafter = SometimesRight(scripted, p_right)
    runner = engine.runner
    engine.speculator = Speculator(
        [drafter], n_vocab=engine.n_vocab, preparation=runner.preparation, computed=runner.computed_rows
    )
    rates: dict[str, list[float]] = {"off": [], "lookup": []}
    requests: list[Request] = []
    texts: list[tuple[int, ...]] = []
    for number in range(n_rounds + 1):
        for spec in rates:
            started = time.perf_counter()
            scripted.texts.clear()
            requests = [_pretended(engine, depth, n_tokens, spec) for _ in range(n_requests)]
            if spec == "off":
                seconds = _seconds(engine)
                texts = [tuple(request.generated) for request in requests]
            else:
                for request, text in zip(requests, texts, strict=True):
                    scripted.texts[id(request.sampler)] = text
                seconds = _seconds(engine)
            if any(request.finish_reason == "failed" for request in requests):
                errors = [request.outbox.result().error for request in requests]
                raise SystemExit(f"depth {depth}: a request failed: {errors}")
            rate = n_requests * (n_tokens - 1) / seconds
            whole = time.perf_counter() - started
            print(f"depth {depth}, {spec}: {rate:.1f} tokens/s ({whole:.1f} s)", file=sys.stderr, flush=True)
            if number:  # the first round makes plans
                rates[spec].append(rate)
    ratios = [b / a for a, b in zip(rates["off"], rates["lookup"], strict=True)]
    counts = [count for request in requests for count in request.drafts.values()]
    return {
        "depth": depth,
        "right": p_right,
        "n_requests": n_requests,
        "ratio": median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "without": median(rates["off"]),
        "with": median(rates["lookup"]),
        "tokens_per_step": sum(r.n_generated for r in requests) / max(1, sum(r.n_steps for r in requests)),
        "drafted": sum(c.drafted for c in counts),
        "accepted": sum(c.accepted for c in counts),
    }


def _make_plans(engine: Engine, scripted: Scripted, depth: int, n_requests: int) -> None:
    """Runs steps of every number of rows, so that no run makes plans or compiles kernels."""
    for n_draft in (0, 1, 3, 7, 15):
        engine.speculator = Speculator(
            [SometimesRight(scripted, 1.0)],
            draft_max=max(1, n_draft),
            n_vocab=engine.n_vocab,
            control=FixedControl(),
        )
        started, n_tokens = time.perf_counter(), 6 * (n_draft + 1)
        spec = "lookup" if n_draft else "off"
        scripted.texts.clear()
        for request in [_pretended(engine, depth, n_tokens, spec) for _ in range(n_requests)]:
            scripted.texts[id(request.sampler)] = (7,) * n_tokens
        _seconds(engine)
        seconds = time.perf_counter() - started
        print(f"depth {depth}: plans for drafts of {n_draft} ({seconds:.1f} s)", file=sys.stderr, flush=True)


def _pretended(engine: Engine, depth: int, n_tokens: int, spec: str) -> Request:
    """A running request whose context is filled with random keys and values."""
    rng = random.Random(depth)
    prompt = [rng.randrange(5, engine.n_vocab) for _ in range(depth + 1)]
    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True, speculative=spec)
    request = engine.new_request(prompt, params)
    cache, n_batch = engine.cache, engine.scheduler.n_batch
    sequence = cache.open((), salt=os.urandom(16), checkpoints=None).seq
    while (n_stored := cache.n_tokens(sequence)) < depth:
        n = min(n_batch, depth - n_stored)
        cache.advance(sequence, n_stored)
        if cache.reserve(sequence, n) is None:
            raise SystemExit(f"no room for a context of {depth} tokens")
        engine.runner.store_random(cache, sequence, n)
        cache.commit(sequence, [0] * n)
    request.sequence, request.n_computed, request.started = sequence, depth, time.perf_counter()
    engine.scheduler.running.append(request)
    return request


def _seconds(engine: Engine) -> float:
    """Seconds of all steps after the first, which follows the filling of the context."""
    engine.step(TURN_SECONDS)
    started = time.perf_counter()
    while engine.has_work:
        engine.step(TURN_SECONDS)
    return time.perf_counter() - started


def show(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| depth | right | requests | with : without | range | tokens/s without | with | tokens a step | accepted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r['depth']} | {r['right']} | {r['n_requests']} | **{r['ratio']:.2f}** "
            f"| {r['low']:.2f}–{r['high']:.2f} | {r['without']:.1f} | {r['with']:.1f} "
            f"| {r['tokens_per_step']:.2f} | {r['accepted']} of {r['drafted']} |"
        )
    return "\n".join(lines)
