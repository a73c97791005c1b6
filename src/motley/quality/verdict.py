"""The figures of a cache type as a plain sentence.

A type gets the best verdict for which it is within all limits:

    verdict                   mean KL     perplexity     recall kept
    as good as f16            ≤ 0.001     ≤ +0.1 %       ≥ 99 %
    slightly worse            ≤ 0.01      ≤ +1 %         ≥ 95 %
    noticeably worse          ≤ 0.1       ≤ +10 %        ≥ 80 %
    broken for this model     anything else

KL is in nats, against the baseline's predictions. The standard error is subtracted from the change of perplexity, so
that a short text does not fail a type by chance. A lower perplexity is within all limits: KL still measures errors that
happen to lower it. Recall is relative to the baseline's, if it was measured.
"""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """From the best to the worst: (in words, largest mean KL, largest perplexity change, smallest recall kept)."""

    AS_GOOD = ("as good as f16", 0.001, 0.001, 0.99)
    SLIGHTLY_WORSE = ("slightly worse", 0.01, 0.01, 0.95)
    NOTICEABLY_WORSE = ("noticeably worse", 0.1, 0.1, 0.8)
    BROKEN = ("broken for this model", float("inf"), float("inf"), 0.0)

    def __init__(self, words: str, kl_mean: float, perplexity_change: float, recall_kept: float) -> None:
        self.words = words
        self.kl_mean = kl_mean
        self.perplexity_change = perplexity_change
        self.recall_kept = recall_kept

    @classmethod
    def of(cls, kl_mean: float, perplexity_change: float, recall_kept: float = 1.0) -> Verdict:
        """The verdict for these figures. `perplexity_change`: 0.01 is one per cent more."""
        for verdict in cls:
            if (
                kl_mean <= verdict.kl_mean
                and perplexity_change <= verdict.perplexity_change
                and recall_kept >= verdict.recall_kept
            ):
                return verdict
        return cls.BROKEN  # NaN
