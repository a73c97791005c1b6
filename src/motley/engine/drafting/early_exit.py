"""The early-exit drafter: the first layers of the model itself, then its output, on the request's own cache.

The keys and values of these layers are stored in slots that the step stores again, with the same values, when it
computes the draft with all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from motley.engine.drafting.draft import Draft, DraftRequest
from motley.engine.drafting.rounds import Lane, RoundChooser
from motley.engine.request import Request
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import BlockCopy
from motley.runtime import Batch, Chunk, PlacedBatch, Runner


class EarlyExit:
    """Drafts with the first `n_layers` layers."""

    name = "exit"
    priors = (0.85,)
    is_free = False
    writes_cache = True

    def __init__(self, runner: Runner, cache: CacheManager, n_layers: int) -> None:
        self._runner, self._cache, self.n_layers = runner, cache, n_layers
        self._rounds = RoundChooser()
        self._copies: list[BlockCopy] = []
        self.is_usual = False

    def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        n_plans = self._runner.n_plans
        lanes = [self._lane(ask) for ask in asks]
        self._rounds.draft([lane for lane in lanes if lane is not None], self._run, self._run_rounds)
        self.is_usual = self._runner.n_plans == n_plans
        return [Draft(() if lane is None else tuple(lane.drafted), self.name) for lane in lanes]

    def may_draft(self, request: Request) -> bool:
        return self._is_possible(request)

    def _is_possible(self, request: Request) -> bool:
        return not request.effort.n_layers or request.effort.n_layers > self.n_layers

    def _lane(self, ask: DraftRequest) -> Lane | None:
        """The request's lane, with slots for its pending token and its draft; None if there is no room for them."""
        request = ask.request
        assert request.sequence is not None
        if not self._is_possible(request):
            return None
        self._cache.advance(request.sequence, request.n_computed)
        copies = self._cache.reserve(request.sequence, request.n_pending + ask.n_max)
        if copies is None:
            return None
        self._copies += copies
        pending = request.tokens[request.n_computed :]
        return Lane(request, ask.n_max, request.sequence, request.n_computed, pending)

    def _run(self, lanes: Sequence[Lane]) -> torch.Tensor:
        tokens = [token for lane in lanes for token in lane.pending]
        logits = self._runner.run(self._placed(lanes), tokens, self._copies)
        self._copies = []
        return logits

    def _run_rounds(
        self, lanes: Sequence[Lane], settings: Sequence[Any], indexes: Sequence[int], n_rounds: int
    ) -> list[list[int]] | None:
        if self._copies:
            return None
        tokens = [lane.pending[0] for lane in lanes]
        return self._runner.draft(self._placed(lanes, n_rounds), tokens, settings, indexes, n_rounds)

    def _placed(self, lanes: Sequence[Lane], n_rounds: int = 1) -> PlacedBatch:
        chunks = [
            Chunk(
                lane.sequence, lane.start, len(lane.pending), 1, lane.request.effort.n_experts, self.n_layers
            )
            for lane in lanes
        ]
        return self._runner.place(Batch.of(chunks), self._cache, n_rounds)
