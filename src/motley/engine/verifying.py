"""Tokens of a step's rows: one for each request, or one for each position of its draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from motley.engine.choosing import ChoiceRow, Chooser, Found, Pending
from motley.engine.request import Request, TokenLogprobs
from motley.engine.scheduler import Step
from motley.engine.trees import ROOT, child_of, path_to


class Chosen(NamedTuple):
    """A token for each request, or its error, and log-probabilities by row as far as they are asked for."""

    found: list[Found]
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
    counts = [1 + step.n_drafted(request) for request in ready]
    return [0, *accumulate(counts)][:-1]


def choose_all(
    chooser: Chooser, step: Step, ready: Sequence[Request], logits: torch.Tensor
) -> list[Found] | None:
    """The tokens of all rows at once, as if all drafts were right: one call of the chooser instead of one for each
    position. None for requests whose constraints or log-probabilities follow the answer, and on a CPU also for those
    whose penalties do: there, a row that is not needed costs as much as one that is.
    """
    first = [row_of(request) for request in ready]
    if any(row.is_special for row in first):
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


def rows_ahead(request: Request, first_row: int, foretold: Sequence[Found] | None) -> list[int]:
    """Rows of the request's tree from its latest token on, as far as tokens were chosen ahead. Row 0: before the draft.

    `first_row`: of the logits, where the request's rows begin.
    """
    place: int | None = request.draft_place
    rows: list[int] = []
    while place is not None:
        rows.append(place + 1)
        token = None if foretold is None else foretold[first_row + place + 1]
        place = (
            child_of(request.draft, request.draft_parents, place, token) if isinstance(token, int) else None
        )
    return rows


def _is_on_gpu(logits: torch.Tensor) -> bool:
    return logits.device.type == "cuda"
