"""Batches that use every kernel and change nothing: for compiling and loading kernels before requests need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from motley.kvcache.arena import GroupBatch, SequenceTable
from motley.kvcache.state_arena import StateBatch
from motley.models import BatchShape
from motley.runtime.batch import PlacedBatch
from motley.runtime.caching import CachePlan

Rehearsal = tuple[BatchShape, int]  # a batch, and the rows of its longest sequence

# Rows of decode batches for which kernels differ: one row; a few; one, two, four tiles of a tensor core; two tiles of
# tokens.
_DECODE_ROWS = (1, 2, 16, 32, 64, 128)
# Rows of a sequence with drafts for which kernels differ; one with more rows is taken for a prompt.
_DRAFT_ROWS = (4, 8, 16)
PREPARED_ROWS = (
    8,
    4,
    16,
    2,
)  # of a sequence with drafts, for which plans are made ahead, the most useful first
# Rows of prompts for which kernels differ: spans of each size, and matrix products by the library.
_PROMPT_ROWS = (32, 64, 128, 256)
_FEW_ROWS = _DRAFT_ROWS[-1]  # a sequence with more rows in a batch is a prompt
_DECODE_AHEAD = (2, 4, 8, 16, 32, 64, 128)  # rows of decode batches that are captured before they are needed
_FEW_AT_FIRST = 8  # rows of the second tier: those that are multiplied as single rows are
# Requests that decode beside a prompt: of many, contexts are split less.
_DECODES_BESIDE_PROMPT = (1, 4, 16, 64)


@dataclass(frozen=True)
class Tier:
    """Batches whose kernels are compiled before those of the next tier."""

    max_rows: int | None  # of the batches that need no others; None: all batches
    shapes: tuple[Rehearsal, ...]


def tiers(n_batch: int, n_parallel: int, *, is_one: bool = False) -> list[Tier]:
    """All batches of `rehearsals`: first a single row, then a few, then the rest. `is_one`: all in one tier."""
    everything = tuple(rehearsals(n_batch, n_parallel))
    single = ((BatchShape(1, 1), 1),)
    few = tuple(each for each in everything if 1 < each[0].n_tokens <= _FEW_AT_FIRST)[::-1]  # slow ones first
    rest = tuple(each for each in everything if each not in (*single, *few))
    if is_one or not rest:
        return [Tier(None, everything)]
    return [Tier(1, single), *([Tier(_FEW_AT_FIRST, few)] if few else []), Tier(None, rest)]


def rehearsals(n_batch: int, n_parallel: int) -> Iterator[Rehearsal]:
    """Batch shapes that together use every kernel, each with the number of rows of its longest sequence.

    Prompts come first, the longest before the others: their kernels take the compiler the most time.
    """
    prompts = [n for n in _PROMPT_ROWS if n <= n_batch]
    yield from ((BatchShape(n, 1), n) for n in dict.fromkeys([n_batch, *prompts]) if n > _FEW_ROWS)
    decodes = [n for n in _DECODE_ROWS if n <= min(n_parallel, n_batch)]
    yield from ((BatchShape(n, n), 1) for n in dict.fromkeys([*decodes, min(n_parallel, n_batch)]))
    yield from ((BatchShape(n, n), n) for n in _DRAFT_ROWS if n <= n_batch)
    for n in _DECODES_BESIDE_PROMPT:  # a prompt in one batch with requests that decode
        if n < n_parallel and _FEW_ROWS + 1 + n <= n_batch:
            yield BatchShape(_FEW_ROWS + 1 + n, 1 + n), _FEW_ROWS + 1


def captured_ahead(max_decodes: int) -> list[Rehearsal]:
    """Decode batches, each launched once and then captured: a first batch of a size takes some tenths of a second
    otherwise, in which all requests wait. The largest is the first: the memory for its graph is enough for the others.
    """
    sizes = [n for n in _DECODE_AHEAD if n <= max_decodes][::-1]
    return [(BatchShape(n, n), 1) for n in sizes for _ in range(2)]


def inert_batch(
    shape: BatchShape, longest: int, cache: CachePlan, extra: Mapping[str, int] | None = None
) -> PlacedBatch:
    """A batch that stores nothing and reads no context: it has no slots, and its positions are before its tables.

    `longest`: rows of its first sequence, which is a prompt if it has many rows; the other sequences have one row each.
    `extra`: other inputs of each token, by name.
    """
    size, block = cache.config.block_size, np.zeros(1, dtype=np.int32)
    starts = [0, *range(longest, shape.n_tokens)]
    tables = [
        SequenceTable(start, n, -n - size, 0, block)
        for start, n in zip(starts, [longest] + [1] * len(starts), strict=False)
    ]
    batch = GroupBatch(torch.empty(0, dtype=torch.int64), tuple(tables))
    zeros = {"positions": shape.n_tokens, "output_rows": shape.n_outputs}
    inputs = {name: torch.zeros(n, dtype=torch.int32) for name, n in zeros.items()}
    for name, value in (extra or {}).items():
        inputs[name] = torch.full((shape.n_tokens,), value, dtype=torch.int32)
    states = () if cache.states is None else (StateBatch(()),)
    return PlacedBatch(shape, inputs, (*(batch for _ in cache.groups), *states))


def rehearse_sampling(logits: torch.Tensor) -> None:
    """Run the samplers of logits on a GPU."""
    from motley.backends.gpu import DeviceSampler, RowSettings

    if logits.device.type == "cuda":
        n = len(logits)
        DeviceSampler(logits.device).launch(logits, [RowSettings(0.8, 40)] * n, [0] * n, {0: [0]})
