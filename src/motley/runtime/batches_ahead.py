"""Batches that run before requests need them: kernels are loaded, plans are made and captured.

On GPUs alone they are inert. A CPU would compute an inert batch's rows, and has no blocks for them: beside one, the
rows are of new sequences, which are stored in free blocks and published nowhere. There, batches have few rows, so that
the CPU soon has time for a request; only prompts that the GPU multiplies by copies of the CPU's weights are long.
"""

from __future__ import annotations

import logging
import time

import torch

from motley.kvcache.manager import CacheManager
from motley.models import N_EXPERT_USED, BatchShape
from motley.runtime.batch import Batch, Chunk
from motley.runtime.caching import CachePlan
from motley.runtime.rehearsals import (
    PREPARED_ROWS,
    Rehearsal,
    captured_ahead,
    inert_batch,
    rehearse_sampling,
)
from motley.runtime.runner import Runner
from motley.runtime.splitting import ModelSplit
from motley.runtime.warming import KernelWarmer

_MAX_ROWS_BESIDE_CPU = 8
_log = logging.getLogger(__name__)


class BatchesAhead:
    """The batches of one model; none without a GPU, or with devices in other processes."""

    def __init__(
        self,
        warmer: KernelWarmer,
        runner: Runner,
        split: ModelSplit,
        cache: CachePlan,
        manager: CacheManager,
        *,
        n_batch: int,
        n_parallel: int,
    ) -> None:
        self._warmer, self._runner, self._split = warmer, runner, split
        self._cache, self._manager = cache, manager
        self._n_batch = min(n_batch, n_parallel * split.options.n_ctx)  # no batch is larger
        self._max_decodes = min(n_parallel, self._n_batch)
        experts = split.params.experts
        self._extra = {} if experts is None else {N_EXPERT_USED: experts.n_used}

    def run_first(self) -> float:
        """Run the batches of a first request: a decode, launched once and then captured, and, while batches have few
        rows, a part of a prompt.

        Returns the seconds that the plan of a decode takes, its capture included; 0.0: not measured.
        """
        if not self._warmer.uses_gpus:
            return 0.0
        self._warmer.wait_prepared()
        if not self._warmer.has_cpu:
            return self._run_first()
        try:
            return self._run_first()
        except Exception as error:  # without these batches, a first request takes longer
            _log.warning("batches of a first request were not run ahead: %s", error)
            return 0.0

    def _run_first(self) -> float:
        max_rows = self._warmer.max_rows
        n_prompt, samples = min(max_rows or 1, self._n_batch), max_rows is None
        if n_prompt > 1:
            self._run(BatchShape(n_prompt, 1), n_prompt)
        self._run(BatchShape(1, 1), 1, samples=samples)
        started = time.perf_counter()
        self._run(BatchShape(1, 1), 1, samples=samples)
        # The first run has loaded kernels, too; a plan takes as long as the capture.
        return 2 * (time.perf_counter() - started)

    @property
    def later(self) -> list[Rehearsal]:
        """Batches of later requests, to be run while the engine is idle: a prompt of a whole batch, which loads kernels
        and libraries, and decode batches, which are captured.
        """
        if not self._warmer.uses_gpus:
            return []
        prompt, decodes = BatchShape(self._n_batch, 1), captured_ahead(self._max_decodes)
        if not self._warmer.has_cpu:
            return [(prompt, self._n_batch), *decodes]
        few = [each for each in decodes if each[0].n_tokens <= _MAX_ROWS_BESIDE_CPU]
        return [(prompt, self._n_batch), *few] if self._split.is_lent(prompt) else few

    def run_later(self, shape: BatchShape, longest: int) -> None:
        """Run one of `later`."""
        self._warmer.wait_libraries()
        self._run(shape, longest)

    @property
    def draft_rows(self) -> tuple[int, ...]:
        """Rows of a sequence with drafts for which `prepare_drafts` makes plans, the most useful first."""
        if not self._warmer.uses_gpus:
            return ()
        max_rows = min(self._n_batch, _MAX_ROWS_BESIDE_CPU if self._warmer.has_cpu else self._n_batch)
        return tuple(n for n in PREPARED_ROWS if n <= max_rows)

    def prepare_drafts(self, n_rows: int) -> None:
        """Makes the plan of a step of one sequence with `n_rows`, and captures it, so that no answer waits for that."""
        for _ in range(2):
            self._run(BatchShape(n_rows, n_rows), n_rows)

    def _run(self, shape: BatchShape, longest: int, *, samples: bool = True) -> None:
        logits = self._run_stored(shape, longest) if self._warmer.has_cpu else self._run_inert(shape, longest)
        if samples and logits is not None:
            rehearse_sampling(logits)

    def _run_inert(self, shape: BatchShape, longest: int) -> torch.Tensor:
        batch = inert_batch(shape, longest, self._cache, self._extra)
        return self._runner.run(batch, [0] * shape.n_tokens, ())

    def _run_stored(self, shape: BatchShape, longest: int) -> torch.Tensor | None:
        """Run a batch of new sequences, which end with it. None: not run, because there is no room without evicting
        blocks of earlier requests.
        """
        manager, opened, copies = self._manager, [], []
        sizes = [longest] + [1] * (shape.n_tokens - longest)
        n_needed = sum(-(-size // manager.block_size) for size in sizes) * manager.block_size
        n_kept = manager.n_evictable * manager.block_size
        if manager.n_free_tokens - n_kept < n_needed:
            return None
        try:
            for size in sizes:
                opened.append(manager.open(find=False))
                found = manager.reserve(opened[-1].seq, size, n_uncertain=min(size, manager.max_uncertain))
                if found is None:
                    return None
                copies += found
            n_outputs = shape.n_outputs - len(sizes) + 1  # of the first sequence; one of each other
            chunks = [
                Chunk(each.seq, 0, size, 1 if i else n_outputs)
                for i, (each, size) in enumerate(zip(opened, sizes, strict=True))
            ]
            placed = self._runner.place(Batch.of(chunks), manager)
            return self._runner.run(placed, [0] * shape.n_tokens, copies)
        finally:
            for each in reversed(opened):
                manager.reject(each)
