"""Tokens of a step's rows: one for each request, or one for each position of its draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from motley.engine.choosing import ChoiceRow, Chooser, Found, Pending
from motley.engine.request import Request, TokenLogprobs
from motley.engine.scheduler import Step


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
    """The tokens of all rows at once, as if all drafts were right: one launch on a GPU instead of one for each
    position. None on a CPU, and for requests whose constraints or log-probabilities follow the answer.
    """
    if not _is_on_gpu(logits) or any(row_of(request).is_special for request in ready):
        return None
    rows = []
    for request in ready:
        draft = step.drafts.get(request, ())
        for n in range(len(draft) + 1):
            history, index = [*request.tokens, *draft[:n]], request.n_generated + n
            rows.append(replace(row_of(request), history=history, index=index))
    return chooser.choose(logits, rows).tokens()


def _is_on_gpu(logits: torch.Tensor) -> bool:
    return logits.device.type == "cuda"
