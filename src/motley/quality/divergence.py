"""The KL divergence of a run's predictions from those of a reference run on the same tokens.

    KL(reference || run) = sum over the vocabulary of p_reference * (log p_reference - log p_run)     in nats

One figure for each position, all in float64: the divergence of a good cache type is smaller than float32's error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
_ROWS_AT_ONCE = 64  # bounds the float64 copies: a row of a large vocabulary has 2 MB


@dataclass(frozen=True)
class RowDivergence:
    """The divergence at each position, so that parts of a text can be concatenated before they are summarized."""

    kl: npt.NDArray[np.float64]  # (rows,), nats
    is_same_top: npt.NDArray[np.bool_]  # (rows,): both runs have the same most likely token

    @classmethod
    def between(cls, reference: Logits, logits: Logits) -> RowDivergence:
        """The divergence of two arrays of logits (rows, vocab)."""
        if reference.shape != logits.shape:
            raise ValueError(f"logits of shape {logits.shape} against a reference of {reference.shape}")
        starts = range(0, len(reference), _ROWS_AT_ONCE)
        parts = [slice(start, start + _ROWS_AT_ONCE) for start in starts]
        kl = [_row_kl(reference[part], logits[part]) for part in parts]
        return cls(np.concatenate(kl), reference.argmax(axis=1) == logits.argmax(axis=1))

    @classmethod
    def join(cls, parts: Sequence[RowDivergence]) -> RowDivergence:
        return cls(np.concatenate([p.kl for p in parts]), np.concatenate([p.is_same_top for p in parts]))

    def summary(self) -> Divergence:
        return Divergence(
            kl_mean=float(self.kl.mean()),
            kl_median=float(np.median(self.kl)),
            kl_p99=float(np.percentile(self.kl, 99)),
            kl_max=float(self.kl.max()),
            same_top=float(self.is_same_top.mean()),
        )


@dataclass(frozen=True)
class Divergence:
    """Summary over all positions. KL in nats: 0 is no difference, 0.01 is hard to notice, 1 is another model."""

    kl_mean: float
    kl_median: float
    kl_p99: float  # 99 % of the positions have less
    kl_max: float
    same_top: float  # share of positions with the same most likely token


def compare(reference: Logits, logits: Logits) -> Divergence:
    """The divergence of `logits` (rows, vocab) from those of a reference run."""
    return RowDivergence.between(reference, logits).summary()


def _row_kl(reference: Logits, logits: Logits) -> npt.NDArray[np.float64]:
    expected, got = _log_softmax(reference), _log_softmax(logits)
    total: npt.NDArray[np.float64] = (np.exp(expected) * (expected - got)).sum(axis=1)
    return total.clip(min=0.0)  # only rounding errors can make it negative


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
