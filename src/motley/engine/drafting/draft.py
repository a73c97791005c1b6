"""Drafts, and the interfaces of drafters. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from motley.engine.request import Request
from motley.engine.trees import MAX_ROWS, ROOT, Parents, child_of, cut, has_children


class Draft(NamedTuple):
    """Tokens that are likely to follow a request's last token: a chain, or a tree of alternatives (`engine.trees`)."""

    tokens: tuple[int, ...]
    drafter: str
    grade: int = 0  # how sure the drafter is: an index of its `priors`
    parents: Parents = ()  # of a tree: for each token the index of the one before it; empty: a chain

    def cut(self, n_tokens: int, max_depth: int = MAX_ROWS) -> Draft:
        """The draft without what is beyond its first `n_tokens` tokens, or deeper than `max_depth`."""
        tokens, parents = cut(self.tokens, self.parents, n_tokens, max_depth)
        return self._replace(tokens=tokens, parents=parents)

    def n_right(self, came: Sequence[int]) -> tuple[int, bool]:
        """How many of the tokens that came the draft has, and whether it has other ones instead of the next."""
        n_came = len(came)
        if not self.parents and self.tokens[:n_came] == tuple(came):
            return n_came, False
        place = ROOT
        for n, token in enumerate(came):
            after = child_of(self.tokens, self.parents, place, token)
            if after is None:
                return n, has_children(len(self.tokens), self.parents, place)
            place = after
        return n_came, False


class DraftRequest(NamedTuple):
    """A request that needs a draft of up to `n_max` tokens. All its tokens but the last are computed."""

    request: Request
    n_max: int  # of a tree: the most tokens of a path
    max_rows: int = MAX_ROWS - 1  # the most tokens of a tree


class Drafter(Protocol):
    """Guesses the next tokens of requests. Only the engine's thread calls it."""

    @property
    def name(self) -> str: ...

    @property
    def priors(self) -> tuple[float, ...]:
        """For each grade, the assumed probability that a drafted token is right if those before it are."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether drafting takes a negligible time. Other drafters are only called for drafts that pay."""
        ...

    @property
    def writes_cache(self) -> bool:
        """Whether it computes in the requests' own cache, so that its failure is a failure of the step."""
        ...

    @property
    def is_usual(self) -> bool:
        """Whether the latest drafts took the usual time: no plan was made, and no prompt was computed."""
        ...

    def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each request; a draft without tokens if there is none."""
        ...

    def may_draft(self, request: Request) -> bool:
        """Whether it is likely to have a draft after the request's next token. Takes a negligible time."""
        ...


@runtime_checkable
class TreeDrafter(Protocol):
    """Further members of a drafter whose drafts may be trees."""

    @property
    def has_trees(self) -> bool:
        """Whether they are, with this model and these devices."""
        ...


@runtime_checkable
class LayerDrafter(Protocol):
    """Further members of a drafter that computes the first layers of the model."""

    @property
    def name(self) -> str: ...

    @property
    def n_layers(self) -> int:
        """How many. Requests that use no more layers than these have no such drafts."""
        ...


@runtime_checkable
class Watcher(Protocol):
    """Further members of a drafter that needs the model's hidden states."""

    @property
    def name(self) -> str: ...

    def observe(self, request: Request, start: int, hidden: Any) -> None:
        """Takes hidden states, a tensor (rows, embd), of a request's tokens from position `start` on."""
        ...

    def catch_up(self, requests: Iterable[Request]) -> None:
        """Called before each step."""
        ...


@runtime_checkable
class CacheOwner(Protocol):
    """Further members of a drafter with a cache of its own."""

    def give_back(self) -> None:
        """Frees what the cache has of ended requests, and releases the memory of empty blocks: demand paging."""
        ...

    def forget(self, tokens: Sequence[int], salt: bytes) -> None:
        """Drops the cached blocks of these tokens, as `CacheManager.unpublish`."""
        ...


@runtime_checkable
class LearningDrafter(Protocol):
    """Further members of a drafter that learns from all rows of its drafts."""

    def learn(self, request: Request, draft: Draft, outputs: Sequence[int]) -> None:
        """Takes the likeliest tokens after the request's last token and after each token of its draft.

        Called before tokens are accepted.
        """
        ...
