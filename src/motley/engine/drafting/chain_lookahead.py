"""Lookahead for devices whose attention has no trees: all guesses of a step are one sequence.

A step computes a window of W guessed tokens after the request's last one, all at once. Each row says what should follow
its token, so the rows' outputs are better guesses for the next step (Jacobi iteration). What follows what, along up to
N steps, is an n-gram of the model's own, and goes into a pool: up to G for each first token. A draft is what the pool
says follows the last token, again and again; where the pool has no entry, the window itself. It needs no second model.

A guess sees all guesses before it, and one n-gram is verified in a step: see lookahead.py for the better form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from motley.engine.drafting.draft import Draft, DraftRequest
from motley.engine.drafting.lookahead import GramPool, LookaheadSizes, keep
from motley.engine.request import Request

_WINDOW, _POOL = 0, 1  # grades


@dataclass
class _Guesses:
    """The guesses of a request's next tokens."""

    # Position in the answer → the n-gram that ends with the guess for it.
    grams: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pool: GramPool = field(default_factory=dict)


class ChainLookahead:
    """Drafts by Jacobi iteration and n-grams."""

    name = "lookahead"
    priors = (0.35, 0.6)
    is_free = True
    is_usual = True
    writes_cache = False

    def __init__(self, sizes: LookaheadSizes | None = None) -> None:
        self._sizes = sizes or LookaheadSizes()

    def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(ask.request, min(ask.n_max, self._sizes.window)) for ask in asks]

    def may_draft(self, request: Request) -> bool:
        return True

    def learn(self, request: Request, draft: Draft, outputs: Sequence[int]) -> None:
        """Takes what the model says after the request's last token and after each token of its draft."""
        known = _guesses(request)
        start = request.n_generated
        grams: dict[int, tuple[int, ...]] = {}
        for position, (token, output) in enumerate(
            zip((request.tokens[-1], *draft.tokens), outputs, strict=True), start - 1
        ):
            before = known.grams.get(position, ())
            chain = before if before[-1:] == (token,) else (token,)
            grams[position + 1] = gram = (*chain, output)[-self._sizes.n :]
            keep(known.pool, gram, self._sizes.n_kept)
        known.grams = grams

    def _draft(self, request: Request, n_max: int) -> Draft:
        known = _guesses(request)
        tokens: list[int] = []
        last = request.tokens[-1]
        while len(tokens) < n_max and (rests := known.pool.get(last)):
            longest = max(reversed(list(rests)), key=len)  # the latest of the longest
            tokens += longest
            last = tokens[-1]
        grade = _POOL if tokens else _WINDOW
        position = request.n_generated + len(tokens)
        while len(tokens) < n_max:  # a guess of the window; at first, some token of the text
            gram = known.grams.get(position)
            tokens.append(gram[-1] if gram else request.tokens[-1 - len(tokens) % len(request.tokens)])
            position += 1
        return Draft(tuple(tokens[:n_max]), self.name, grade)


def _guesses(request: Request) -> _Guesses:
    known = request.memory.get(ChainLookahead.name)
    if known is None:
        known = request.memory[ChainLookahead.name] = _Guesses()
    assert isinstance(known, _Guesses)
    return known
