"""Drafting with a model: rounds of one token for each request, all requests in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from motley.engine.choosing import ChoiceRow, Chooser, TokenOrError, chooser_for
from motley.engine.request import Request

Run = Callable[[Sequence["Lane"]], torch.Tensor]
# (lanes with one pending token each, native settings of their samplers, indexes of their tokens, rounds) → the tokens
# of each round; None: not possible.
RunRounds = Callable[[Sequence["Lane"], Sequence[Any], Sequence[int], int], list[list[int]] | None]


@dataclass
class Lane:
    """A request, its sequence in the drafter's cache, and its draft so far."""

    request: Request
    n_max: int
    sequence: int
    start: int  # position of the first of `pending`
    pending: list[int]  # tokens to be computed in the next round
    drafted: list[int] = field(default_factory=list)

    def take(self, token: TokenOrError) -> bool:
        """Appends a token to the draft. Returns whether the draft may continue: an error ends only the draft."""
        if not isinstance(token, int) or token < 0:
            return False
        self.start += len(self.pending)
        self.pending = [token]
        self.drafted.append(token)
        return token not in self.request.stop_ids


class RoundChooser:
    """Chooses drafted tokens with the requests' own samplers and random numbers: so, often, what the model will choose.

    Penalties and random numbers are those of the token's place in the answer; a grammar is not applied.
    """

    def __init__(self) -> None:
        self._chooser: Chooser | None = None

    def draft(self, lanes: Sequence[Lane], run: Run, run_rounds: RunRounds | None = None) -> None:
        """Extends all drafts. `run` computes the pending tokens of lanes and returns the logits after the last ones;
        `run_rounds` computes several rounds in one call, and extends nothing.
        """
        while lanes := [lane for lane in lanes if len(lane.drafted) < lane.n_max]:
            rounds: Sequence[Sequence[TokenOrError]] | None = None
            if run_rounds is not None:
                rounds = _run_rounds(lanes, run_rounds)
            if rounds is None:
                logits = run(lanes)
                if self._chooser is None:
                    self._chooser = chooser_for(logits.device)
                rounds = [self._chooser.choose(logits, [_row(lane) for lane in lanes]).tokens()]
            # All rounds are computed and stored, so the other lanes take theirs when a lane has ended.
            rows = list(enumerate(lanes))
            for found in rounds:
                rows = [(row, lane) for row, lane in rows if lane.take(found[row])]
            lanes = [lane for _, lane in rows]


def _run_rounds(lanes: Sequence[Lane], run_rounds: RunRounds) -> list[list[int]] | None:
    """The tokens of as many rounds as all lanes have left, if native code can choose them."""
    settings = [lane.request.sampler.native for lane in lanes]
    if not all(settings) or any(len(lane.pending) > 1 for lane in lanes):
        return None
    indexes = [lane.request.n_generated + len(lane.drafted) for lane in lanes]
    return run_rounds(lanes, settings, indexes, min(lane.n_max - len(lane.drafted) for lane in lanes))


def _row(lane: Lane) -> ChoiceRow:
    request = lane.request
    history = [*request.tokens, *lane.drafted] if request.sampler.is_shaping else request.tokens
    return ChoiceRow(request.sampler, history, request.n_generated + len(lane.drafted))
