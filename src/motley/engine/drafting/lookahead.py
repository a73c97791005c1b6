"""The lookahead drafter: Jacobi iteration over the tokens after the last one, and a pool of n-grams. Imports no torch.

A draft is a tree of two parts that do not see each other:

- *Candidates*: up to G n-grams of the pool that begin with the request's last token, as a trie. They are verified all
  at once. The latest one continues by further n-grams, as far as W tokens.
- The *window*: guesses for the next tokens, of N - 1 steps, W for each. Column j at level 0 is the guess for the j-th
  token from here, column 0 the last token itself; below it are later guesses for the tokens after it:

      level 0      last ─ a1 ─ a2 ─ a3      of the oldest step
      level 1       b1    b2   b3   b4
      level 2       c2    c3   c4   c5      of the latest step

  A row sees level 0 up to its column, and its column. So (last, b1, c2), (a1, b2, c3), … and what the model says after
  them are n-grams of the model's own: they go into the pool. What it says becomes the latest level, and the oldest one
  is forgotten.

The pool also has the n-grams of the text. It keeps the latest G for each first token. No second model is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from motley.engine.drafting.draft import Draft, DraftRequest
from motley.engine.request import Request
from motley.engine.trees import ROOT
from motley.errors import ConfigError

_MAX_WINDOW, _MAX_N, _MAX_POOL = 63, 16, 64
_MAX_TEXT = 2048  # tokens of a prompt whose n-grams are taken
_WINDOW, _POOL = 0, 1  # grades: without candidates, and with

GramPool = dict[
    int, dict[tuple[int, ...], None]
]  # first token → the other tokens of its n-grams, the latest last


class LookaheadSizes(NamedTuple):
    """W, N and G."""

    window: int = 7  # tokens of a draft
    n: int = 5  # tokens of an n-gram, its first included
    n_kept: int = 7  # n-grams with the same first token

    @staticmethod
    def read(text: str) -> LookaheadSizes:
        """From "W,N,G". ConfigError for anything else."""
        try:
            window, n, n_kept = (int(part) for part in text.split(","))
        except ValueError:
            window = n = n_kept = 0
        sizes = LookaheadSizes(window, n, n_kept)
        limits = ((1, _MAX_WINDOW), (2, _MAX_N), (1, _MAX_POOL))
        if not all(low <= size <= high for size, (low, high) in zip(sizes, limits, strict=True)):
            raise ConfigError(
                f"lookahead {text!r:.60} is not W,N,G",
                hint=f"a window of 1 to {_MAX_WINDOW} tokens, n-grams of 2 to {_MAX_N}, 1 to {_MAX_POOL} of them kept "
                "for each first token: for example 7,5,7",
            )
        return sizes


def keep(pool: GramPool, gram: tuple[int, ...], n_kept: int) -> None:
    """Puts an n-gram into a pool, as the latest one of its first token; of more than `n_kept` the oldest leaves."""
    rests = pool.setdefault(gram[0], {})
    rests.pop(gram[1:], None)
    rests[gram[1:]] = None
    if len(rests) > n_kept:
        del rests[next(iter(rests))]


@dataclass
class _Guesses:
    """The guesses of a request's next tokens. Positions count from the answer's first token."""

    levels: list[dict[int, int]]  # of the window, the oldest first: position → guess
    pool: GramPool = field(default_factory=dict)
    n_taken: int = -1  # generated tokens whose n-grams are in the pool; -1: not even the prompt's
    cells: dict[tuple[int, int], int] = field(default_factory=dict)  # (level, column) → index in the draft


@dataclass
class _Tree:
    """A draft that grows."""

    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def add(self, parent: int, token: int) -> int | None:
        """The index of a new token after `parent`; None: there is no room."""
        if len(self.tokens) >= self.max_tokens:
            return None
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1


class Lookahead:
    """Drafts by Jacobi iteration and n-grams, as trees."""

    name = "lookahead"
    priors = (0.2, 0.6)
    is_free = True
    is_usual = True
    writes_cache = False
    has_trees = True

    def __init__(self, sizes: LookaheadSizes | None = None) -> None:
        self._sizes = sizes or LookaheadSizes()

    def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def may_draft(self, request: Request) -> bool:
        return True

    def learn(self, request: Request, draft: Draft, outputs: Sequence[int]) -> None:
        """Takes what the model says after the request's last token and after each token of its draft."""
        known, n_levels = self._known(request), self._sizes.n - 1
        position = request.n_generated - 1
        latest: dict[int, int] = {}
        for (level, column), index in known.cells.items():
            if level < n_levels - 1 or index >= len(draft.tokens):
                continue
            gram = [outputs[index + 1]]
            while index != ROOT and len(gram) < n_levels:
                gram.append(draft.tokens[index])
                index = draft.parents[index] if draft.parents else index - 1
            gram.append(draft.tokens[index] if index != ROOT else request.tokens[-1])
            keep(known.pool, tuple(gram[::-1]), self._sizes.n_kept)
            latest[position + column + n_levels] = gram[0]
        if latest:
            known.levels = [*known.levels[1:], latest]

    def _known(self, request: Request) -> _Guesses:
        known = request.memory.get(self.name)
        if known is None:
            known = request.memory[self.name] = _Guesses([{} for _ in range(self._sizes.n - 1)])
        assert isinstance(known, _Guesses)
        return known

    def _draft(self, ask: DraftRequest) -> Draft:
        request, known = ask.request, self._known(ask.request)
        self._take_text(known, request)
        n_columns = self._columns(ask.max_rows)
        n_window = max(0, n_columns * (self._sizes.n - 1) - 1)
        tree = _Tree(ask.max_rows - n_window)
        self._add_candidates(tree, known, request, ask.n_max)
        n_candidates = len(tree.tokens)
        tree.max_tokens = ask.max_rows
        self._add_window(tree, known, request, ask.n_max, n_columns)
        grade = _POOL if n_candidates else _WINDOW
        return Draft(tuple(tree.tokens), self.name, grade, tuple(tree.parents))

    def _columns(self, max_rows: int) -> int:
        """The columns of the window: it takes at most half of the rows."""
        return min(self._sizes.window, (max_rows // 2 + 1) // (self._sizes.n - 1))

    def _add_candidates(self, tree: _Tree, known: _Guesses, request: Request, n_max: int) -> None:
        rests = [*known.pool.get(request.tokens[-1], ())][::-1]
        if rests:
            rests[0] = self._continued(known, rests[0], min(n_max, self._sizes.window))
        children: dict[tuple[int, int], int] = {}
        for rest in rests:
            place = ROOT
            for token in rest[:n_max]:
                index = children.get((place, token))
                if index is None:
                    index = tree.add(place, token)
                    if index is None:
                        return
                    children[place, token] = index
                place = index

    def _continued(self, known: _Guesses, rest: tuple[int, ...], n_max: int) -> tuple[int, ...]:
        while len(rest) < n_max and (more := known.pool.get(rest[-1])):
            rest += next(reversed(more))
        return rest[: max(n_max, self._sizes.n - 1)]

    def _add_window(self, tree: _Tree, known: _Guesses, request: Request, n_max: int, n_columns: int) -> None:
        """Adds the window's rows, as far as they are not beyond the answer."""
        known.cells = {(0, 0): ROOT}
        start = request.n_generated - 1
        for column in range(n_columns):
            for level in range(self._sizes.n - 1):
                if level == column == 0:
                    continue
                above = known.cells.get((level - 1, column) if level else (0, column - 1))
                if above is None or column + level > n_max:
                    break
                token = known.levels[level].get(start + column + level)
                if token is None:  # some token of the text
                    token = request.tokens[-1 - (3 * column + 7 * level) % len(request.tokens)]
                index = tree.add(above, token)
                if index is None:
                    return
                known.cells[level, column] = index

    def _take_text(self, known: _Guesses, request: Request) -> None:
        """Puts the n-grams that end with the request's new tokens into the pool."""
        n = self._sizes.n
        if known.n_taken < 0:
            text = request.tokens[-_MAX_TEXT:]
        else:
            n_new = request.n_generated - known.n_taken
            text = request.tokens[-(n_new + n - 1) :] if n_new else []
        known.n_taken = request.n_generated
        for i in range(len(text) - n + 1):
            keep(known.pool, tuple(text[i : i + n]), self._sizes.n_kept)
