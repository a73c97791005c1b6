"""Tokens of a step's rows: one for each request, or one for each position of its draft.

verification.begin(chooser, logits, speculator)             the step with drafts is computed
verification.choose(ready)                                  the first token of each request
while requests := verification.advance(scheduler, runner):  whose latest token was right in their draft
    verification.choose(requests)                           their next token
verification.finish(speculator)                             drafters are told
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from motley.backends import choose_rows
from motley.engine.choosing import ChoiceRow, Chooser, Pending, TokenOrError, checked
from motley.engine.drafting import Draft, Speculator
from motley.engine.request import Request, TokenLogprobs
from motley.engine.scheduler import Scheduler, Step
from motley.engine.trees import ROOT, child_of, has_children, path_to
from motley.kvcache.groups import BlockShift
from motley.runtime import Runner


class Chosen(NamedTuple):
    """A token for each request, or its error, and log-probabilities by row as far as they are requested."""

    found: list[TokenOrError]
    logprobs: Mapping[int, TokenLogprobs]


NONE_CHOSEN = Chosen([], {})


def row_of(request: Request) -> ChoiceRow:
    """The request's next token, to be chosen."""
    return ChoiceRow(request.sampler, request.tokens, request.n_generated, request.matcher, request.banned)


def chosen_of(pending: Pending) -> Chosen:
    """The chosen tokens, once they are computed, and their log-probabilities by row."""
    tokens = pending.tokens()
    return Chosen(tokens, {} if pending.logprobs is None else pending.logprobs(tokens))


def first_rows(step: Step, ready: Sequence[Request]) -> list[int]:
    """The row of the logits for the next token of each request of `ready`; the rows of its draft follow."""
    first, rows, drafts = 0, [], step.drafts
    for request in ready:
        rows.append(first)
        first += 1 + len(drafts[request]) if request in drafts else 1
    return rows


def choose_all(
    chooser: Chooser, step: Step, ready: Sequence[Request], logits: torch.Tensor
) -> list[TokenOrError] | None:
    """The tokens of all rows at once, as if all drafts were right: one call of the chooser instead of one for each
    position. None for requests whose constraints, log-probabilities or samplers' states follow the answer, and on a CPU
    also for those whose penalties do: there, a row that is not needed costs as much as one that is.
    """
    first = [row_of(request) for request in ready]
    settings = None if step.trees else chooser.settings(first)
    if settings is not None:
        return checked(choose_rows(logits, *_along_drafts(step, ready, settings)))
    if any(row.is_special or row.sampler.has_state for row in first):
        return None
    if not _is_on_gpu(logits) and any(row.sampler.is_shaping for row in first):
        return None
    if step.trees and not _is_on_gpu(logits) and any(row.sampler.params.temperature > 0 for row in first):
        return None  # most rows of a tree are not needed
    rows = []
    for request, row in zip(ready, first, strict=True):
        draft, parents = step.drafts.get(request, ()), step.trees.get(request, ())
        if not parents and not row.sampler.is_shaping:
            rows += [ChoiceRow(row.sampler, row.history, row.index + n) for n in range(len(draft) + 1)]
            continue
        for place in range(ROOT, len(draft)):
            path = path_to(parents, place)
            history = [*request.tokens, *(draft[i] for i in path)] if row.sampler.is_shaping else row.history
            rows.append(ChoiceRow(row.sampler, history, row.index + len(path)))
    return chooser.choose(logits, rows).tokens()


def _along_drafts(
    step: Step, ready: Sequence[Request], settings: Sequence[Any]
) -> tuple[list[Any], list[int]]:
    """For all rows of drafts that are no trees, the settings of their requests and the indexes of their tokens."""
    repeated: list[Any] = []
    indexes: list[int] = []
    for request, own in zip(ready, settings, strict=True):
        n_rows, first = 1 + step.n_drafted(request), len(request.generated)
        repeated += [own] * n_rows
        indexes += range(first, first + n_rows)
    return repeated, indexes


def rows_ahead(request: Request, first_row: int, all_tokens: Sequence[TokenOrError] | None) -> list[int]:
    """Rows of the request's tree from its latest token on, as far as tokens were chosen ahead. Row 0: before the draft.

    `first_row`: of the logits, where the request's rows begin.
    """
    place: int | None = request.draft_place
    rows: list[int] = []
    while place is not None:
        rows.append(place + 1)
        token = None if all_tokens is None else all_tokens[first_row + place + 1]
        place = (
            child_of(request.draft, request.draft_parents, place, token) if isinstance(token, int) else None
        )
    return rows


class DraftVerification:
    """A computed step with drafts: chooses the tokens of its requests, one after the other, while drafts are right.

    A row of a draft is valid if all tokens before it were right. The first token that differs is kept, too. In a tree,
    the next row is that of the alternative that was chosen.
    """

    def __init__(self, step: Step, ready: Sequence[Request], drafts: Mapping[Request, Draft]) -> None:
        """`ready`: the requests that get tokens. `drafts`: as they were proposed; the step may have shorter ones."""
        self._step = step
        self._drafts: dict[Request, Draft] = {}
        for request, tokens in step.drafts.items():
            draft = drafts[request]
            self._drafts[request] = draft if len(draft.tokens) == len(tokens) else draft.cut(len(tokens))
        self._first_row = dict(zip(ready, first_rows(step, ready), strict=True))
        self._chooser: Chooser | None = None
        self._logits: torch.Tensor | None = None
        self._all_tokens: list[TokenOrError] | None = (
            None  # the tokens of all rows, if they were chosen at once
        )
        self._n_moved: dict[Request, int] = {}  # tokens of trees whose K/V are in their places
        self._left = list(self._drafts)  # requests whose drafted tokens were right so far

    def begin(self, chooser: Chooser, logits: torch.Tensor, speculator: Speculator) -> None:
        """Gives requests their drafts to compare tokens with, passes the likeliest tokens of all rows to drafters that
        learn from them, and chooses the tokens of all rows at once if that is possible.
        """
        for request, draft in self._drafts.items():
            if speculator.learns(draft.drafter):
                row = self._first_row[request]
                outputs = logits[row : row + 1 + len(draft.tokens)].argmax(1).tolist()
                speculator.learn(request, draft, outputs)
        self._chooser, self._logits = chooser, logits
        self.begin_chosen(choose_all(chooser, self._step, list(self._first_row), logits))

    def begin_chosen(self, all_tokens: list[TokenOrError] | None) -> None:
        """The same where the tokens of all rows are chosen, and no drafter learns from them."""
        for request, draft in self._drafts.items():
            request.expect(draft.drafter, draft.tokens, draft.parents)
        self._all_tokens = all_tokens

    def choose(self, requests: Sequence[Request]) -> Chosen:
        """The next token of each request."""
        # Of a request without a draft, it is the only row.
        rows = [self._first_row[r] + (1 + r.draft_place if r in self._drafts else 0) for r in requests]
        if self._all_tokens is not None:
            return Chosen([self._all_tokens[row] for row in rows], {})
        assert self._chooser is not None, "it comes with `begin`"
        assert self._logits is not None
        return chosen_of(self._chooser.choose(self._logits[rows], [row_of(request) for request in requests]))

    def further_tokens(self) -> list[tuple[Request, list[TokenOrError]]] | None:
        """The further tokens of each request whose first token was right, up to the one after its whole draft.

        None if they depend on what is accepted, or if drafts are trees: then `advance` and `choose` continue.
        """
        if self._all_tokens is None or self._step.trees:
            return None
        found = []
        for request, draft in self._drafts.items():
            if request.draft and not request.is_finished:
                row = self._first_row[request] + 1
                found.append((request, self._all_tokens[row : row + len(draft.tokens)]))
        return found

    def advance(self, scheduler: Scheduler, runner: Runner) -> list[Request]:
        """The requests whose latest token was right in their draft; its K/V are in the cache from now on."""
        self._left = [request for request in self._left if request.draft and not request.is_finished]
        if self._step.trees:
            self._move_rows(scheduler, runner)
        for request in self._left:
            scheduler.confirm(request)
        return self._left

    def finish(self, speculator: Speculator) -> None:
        """Tells drafters how many of their tokens were right."""
        for request, draft in self._drafts.items():
            is_rejected = not request.draft and has_children(
                len(draft.tokens), draft.parents, request.draft_place
            )
            speculator.note_draft(request, draft, request.n_matched, is_rejected)
            request.end_draft()

    def abandon(self) -> None:
        """Drops all drafts after a failed step: its requests compute their next tokens without them."""
        for request in self._drafts:
            request.end_draft()

    def _move_rows(self, scheduler: Scheduler, runner: Runner) -> None:
        """Moves K/V of rows of trees that are their requests' next tokens to these tokens' slots."""
        moves: list[BlockShift] = []
        for request in self._left:
            if request.draft_parents and self._n_moved.get(request, 0) < request.n_matched:
                rows = rows_ahead(request, self._first_row[request], self._all_tokens)
                self._n_moved[request] = request.n_matched + len(rows) - 1
                moves += scheduler.move(request, rows)
        if moves:
            runner.shift(moves)


def _is_on_gpu(logits: torch.Tensor) -> bool:
    return logits.device.type == "cuda"
