"""Drafters for tests: they know the right answers, and are wrong as often as a test needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from motley import LLM
from motley.engine import Engine, Request, SamplingParams
from motley.engine.drafting import Draft, Speculator
from motley.engine.drafting.control import FixedControl
from motley.engine.drafting.draft import DraftRequest

# Gives a draft: the rest of the right answer, the most tokens that it may have, and the vocabulary's size.
Guess = Callable[[random.Random, tuple[int, ...], int, int], Sequence[int]]


def right(_rng: random.Random, rest: tuple[int, ...], _n_max: int, _n_vocab: int) -> Sequence[int]:
    return rest


def wrong(rng: random.Random, _rest: tuple[int, ...], n_max: int, n_vocab: int) -> Sequence[int]:
    return [rng.randrange(n_vocab) for _ in range(n_max)]


def half(rng: random.Random, rest: tuple[int, ...], n_max: int, n_vocab: int) -> Sequence[int]:
    """Right up to a random place, then random."""
    n_right = rng.randint(0, min(len(rest), n_max))
    return [*rest[:n_right], *(rng.randrange(n_vocab) for _ in range(n_max - n_right))]


def now_and_then(rng: random.Random, rest: tuple[int, ...], n_max: int, n_vocab: int) -> Sequence[int]:
    """As `half`, in every second step: some requests of a step have a draft, and others have none."""
    return half(rng, rest, n_max, n_vocab) if rng.random() < 0.5 else ()


def too_long(rng: random.Random, rest: tuple[int, ...], n_max: int, n_vocab: int) -> Sequence[int]:
    return [*rest[: n_max + 5], *(rng.randrange(n_vocab) for _ in range(200))]


def none(_rng: random.Random, _rest: tuple[int, ...], _n_max: int, _n_vocab: int) -> Sequence[int]:
    return ()


def unknown(rng: random.Random, rest: tuple[int, ...], _n_max: int, n_vocab: int) -> Sequence[int]:
    """Tokens that are not in the vocabulary."""
    return [*rest[: rng.randint(0, 3)], n_vocab, -1]


GUESSES: tuple[Guess, ...] = (right, wrong, half, now_and_then, too_long, none, unknown)


class Tree(list[int]):
    """A guess that is a tree."""

    def __init__(self) -> None:
        self.parents: list[int] = []

    def add(self, token: int, parent: int) -> int:
        """The index of a new token."""
        self.append(token)
        self.parents.append(parent)
        return len(self) - 1

    def add_chain(self, tokens: Sequence[int], parent: int = -1) -> None:
        for token in tokens:
            parent = self.add(token, parent)


def right_last(rng: random.Random, rest: tuple[int, ...], n_max: int, n_vocab: int) -> Sequence[int]:
    """Three wrong branches, then the right one."""
    tree = Tree()
    for _ in range(3):
        tree.add_chain([rng.randrange(n_vocab) for _ in range(3)])
    tree.add_chain(rest[:n_max])
    return tree


def scattered(rng: random.Random, rest: tuple[int, ...], n_max: int, n_vocab: int) -> Sequence[int]:
    """A random tree; the right tokens, up to a random one, are somewhere in it."""
    n_right = rng.randint(0, min(len(rest), n_max))
    n_tokens = n_right + rng.randint(1, 25)
    places = sorted(rng.sample(range(n_tokens), n_right))
    tree, last = Tree(), -1
    for i in range(n_tokens):
        if i in places:
            last = tree.add(rest[places.index(i)], last)
        else:
            tree.add(rng.randrange(n_vocab), rng.randrange(-1, i))
    return tree


def bushy(rng: random.Random, rest: tuple[int, ...], n_max: int, n_vocab: int) -> Sequence[int]:
    """Alternatives after each right token, level by level."""
    tree, last = Tree(), -1
    for token in rest[:n_max]:
        parent, alternatives = last, [rng.randrange(n_vocab) for _ in range(rng.randint(0, 3))]
        alternatives.insert(rng.randint(0, len(alternatives)), token)
        for each in alternatives:
            index = tree.add(each, parent)
            last = index if each == token else last
    return tree


def twins(rng: random.Random, rest: tuple[int, ...], _n_max: int, n_vocab: int) -> Sequence[int]:
    """The right token twice, once with wrong tokens after it; and more rows than a step has."""
    tree = Tree()
    tree.add_chain([*rest[:1], rng.randrange(n_vocab), 5])
    tree.add_chain(rest)
    for _ in range(100):
        tree.add(rng.randrange(n_vocab), rng.randrange(-1, len(tree)))
    return tree


TREES: tuple[Guess, ...] = (right_last, scattered, bushy, twins)


class Knowing:
    """A drafter that has been told the answer to each prompt."""

    name = "lookup"  # so that requests may choose it by name
    priors = (0.5,)
    is_free = True
    is_usual = True
    writes_cache = False
    has_trees = True

    def __init__(self, guess: Guess, n_vocab: int, seed: int = 0) -> None:
        self.answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.n_accepted: list[int] = []  # of each draft
        self._guess, self._n_vocab, self._rng = guess, n_vocab, random.Random(seed)

    def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        found = [self._tokens(ask) for ask in asks]
        return [Draft(tuple(each), self.name, 0, tuple(getattr(each, "parents", ()))) for each in found]

    def may_draft(self, request: Request) -> bool:
        return self._guess is not none

    def _tokens(self, ask: DraftRequest) -> Sequence[int]:
        answer = self.answers.get(ask.request.prompt, ())
        rest = answer[ask.request.n_generated :]
        return self._guess(self._rng, rest, ask.n_max, self._n_vocab)


class _Counting(FixedControl):
    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def note_draft(self, request: Request, draft: Draft, n_right: int, is_rejected: bool) -> None:
        self._counts.append(n_right)


def give(llm: LLM, guess: Guess, *, draft_max: int = 7, seed: int = 0) -> Knowing:
    """Lets the engine use a drafter that knows; all its drafts are computed."""
    drafter = Knowing(guess, llm._loaded.engine.n_vocab, seed)
    llm._loaded.engine.speculator = Speculator(
        [drafter],
        spec="lookup",
        draft_max=draft_max,
        n_vocab=drafter._n_vocab,
        control=_Counting(drafter.n_accepted),
    )
    return drafter


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], max_steps: int = 5000
) -> list[Request]:
    """All requests, finished. The cache is checked after each step."""
    requests = [engine.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    for _ in range(max_steps):
        if not engine.has_work:
            assert not any(request.n_retries for request in requests), "a step failed"
            return requests
        engine.step()
        engine.cache.check_integrity()
        for request in engine.scheduler.running:
            assert request.sequence is not None
            n_committed = engine.cache.n_tokens(request.sequence)
            assert n_committed == request.n_computed <= len(request.tokens)
            # Nothing that was drafted and rejected is in the sequence: it would be published.
            assert list(engine.cache._sequences[request.sequence].tokens) == request.tokens[:n_committed]
    raise AssertionError("the engine does not come to an end")
