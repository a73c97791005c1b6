"""Sampling by the native core: rows of logits in host memory, and each row's parameters → token ids, in one call.

`motley.engine.sampling` is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from motley.backends.cpu.native import HAS_SAMPLER, core

NONE_LEFT, NOT_FINITE = -1, -2  # in place of a token id: every logit is -inf; a logit is NaN or +inf


def row_settings(*, temperature: float, top_k: int, top_p: float, min_p: float, key: int) -> Any | None:
    """A request's parameters for `choose_rows`, to be made once; None if the core cannot draw from so many logits."""
    if not HAS_SAMPLER or (temperature > 0 and not 1 <= top_k <= core.MAX_TOP_K):
        return None
    return core.RowSampler(temperature, top_k, top_p, min_p, key)


def choose_rows(logits: torch.Tensor, settings: Sequence[Any], indexes: Sequence[int]) -> list[int]:
    """A token for each row of `logits` (rows, vocab), NONE_LEFT or NOT_FINITE. `indexes`: of the tokens in their
    answers.
    """
    n_rows, n_vocab = logits.shape
    assert n_rows == len(settings), (logits.shape, len(settings))
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        logits = logits.float().contiguous()
    chosen: list[int] = core.choose(logits.data_ptr(), n_vocab, settings, indexes)
    return chosen
