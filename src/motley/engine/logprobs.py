"""Log-probabilities of chosen tokens and of the likeliest ones, for requests that ask for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from motley.engine.request import TokenLogprobs
from motley.engine.sampling import Candidates, Sampler, candidates, shortlist


class Watched(Protocol):
    """A row whose request may need log-probabilities."""

    @property
    def sampler(self) -> Sampler: ...
    @property
    def history(self) -> Sequence[int]: ...
    @property
    def index(self) -> int: ...


class RawRows:
    """Copies of rows as the model computed them: choosing a token may overwrite the logits."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[Watched]) -> None:
        self._counts = {  # by row: how many of the likeliest tokens are wanted
            i: params.logprobs
            for i, row in enumerate(rows)
            if (params := row.sampler.params).logprobs is not None and not params.post_sampling_probs
        }
        self._rows = logits[list(self._counts)].clone() if self._counts else None

    def entries(self, tokens: Sequence[int | BaseException]) -> dict[int, TokenLogprobs]:
        """The entries of each row: log-softmax of the raw logits at the chosen token and at the likeliest ones."""
        if self._rows is None:
            return {}
        ids = [found if isinstance(found := tokens[row], int) else 0 for row in self._counts]
        totals = torch.logsumexp(self._rows, 1).tolist()
        chosen = self._rows[range(len(ids)), ids].tolist()
        n_top = max(self._counts.values())
        tops = candidates(self._rows, n_top) if n_top else [_NONE] * len(ids)
        found_of = zip(self._counts.items(), ids, totals, chosen, tops, strict=True)
        return {
            row: TokenLogprobs(token, value - total, _pairs(top, count, total))
            for (row, count), token, total, value, top in found_of
        }


class SampledRows:
    """The distributions that tokens are drawn from, after all filters, for `post_sampling_probs`."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[Watched]) -> None:
        """`logits`: with masks, before a chooser has overwritten them."""
        self._watched = {
            i: row
            for i, row in enumerate(rows)
            if row.sampler.params.logprobs is not None and row.sampler.params.post_sampling_probs
        }
        chosen = list(self._watched.values())
        self._lists = (
            shortlist(
                logits[list(self._watched)], [row.sampler for row in chosen], [row.history for row in chosen]
            )
            if chosen
            else []
        )

    def entries(self, tokens: Sequence[int | BaseException]) -> dict[int, TokenLogprobs]:
        """The entries of each row: log-probabilities after sampling; -inf for a token that a filter removed."""
        found: dict[int, TokenLogprobs] = {}
        for (i, row), each in zip(self._watched.items(), self._lists, strict=True):
            token = tokens[i]
            if not isinstance(token, int):
                continue
            values, ids = row.sampler.distribution(each, row.index)
            total = float(np.logaddexp.reduce(values))
            order = (-values).argsort(kind="stable")
            chosen = np.flatnonzero(ids == token)
            logprob = float(values[chosen[0]]) - total if len(chosen) else -math.inf
            top = _pairs((values[order], ids[order]), row.sampler.params.logprobs or 0, total)
            found[i] = TokenLogprobs(token, logprob, top)
        return found


_NONE: Candidates = (np.empty(0), np.empty(0, dtype=np.int64))


def _pairs(found: Candidates, count: int, total: float) -> tuple[tuple[int, float], ...]:
    values, ids = found
    return tuple((int(i), float(value) - total) for i, value in zip(ids[:count], values[:count], strict=True))
