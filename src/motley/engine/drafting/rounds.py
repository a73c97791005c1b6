"""Drafting with a model: rounds of one token for each request, all requests in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from motley.engine.choosing import ChoiceRow, Chooser, chooser_for
from motley.engine.request import Request

Run = Callable[[Sequence["Lane"]], torch.Tensor]


@dataclass
class Lane:
    """A request, its sequence in the drafter's cache, and its draft so far."""

    request: Request
    n_max: int
    sequence: int
    start: int  # position of the first of `pending`
    pending: list[int]  # tokens to be computed in the next round
    drafted: list[int] = field(default_factory=list)


class RoundChooser:
    """Chooses drafted tokens with the requests' own samplers and random numbers: so, often, what the model will choose.

    Penalties and random numbers are those of the token's place in the answer; a grammar is not applied.
    """

    def __init__(self) -> None:
        self._chooser: Chooser | None = None

    def draft(self, lanes: Sequence[Lane], run: Run) -> None:
        """Extends all drafts. `run` computes the pending tokens of lanes and returns the logits after the last ones."""
        while lanes := [lane for lane in lanes if len(lane.drafted) < lane.n_max]:
            logits = run(lanes)
            if self._chooser is None:
                self._chooser = chooser_for(logits.device)
            found = self._chooser.choose(logits, [_row(lane) for lane in lanes]).tokens()
            kept = []
            for lane, token in zip(lanes, found, strict=True):
                if isinstance(token, int):  # otherwise the lane ends here; the request itself has no error
                    lane.start += len(lane.pending)
                    lane.pending = [token]
                    lane.drafted.append(token)
                    if token not in lane.request.stop_ids:
                        kept.append(lane)
            lanes = kept


def _row(lane: Lane) -> ChoiceRow:
    request = lane.request
    history = [*request.tokens, *lane.drafted]
    return ChoiceRow(request.sampler, history, request.n_generated + len(lane.drafted))
