"""The figures of a cache type as a plain sentence.

A type gets the best verdict all of whose limits it keeps:

    verdict                   mean KL     perplexity     recall kept
    as good as f16            ≤ 0.001     ≤ +0.1 %       ≥ 99 %
    slightly worse            ≤ 0.01      ≤ +1 %         ≥ 95 %
    noticeably worse          ≤ 0.1       ≤ +10 %        ≥ 80 %
    broken for this model     anything else

KL in nats, against the baseline's predictions. The change of perplexity counts less its own standard error, so that
a short text condemns no type by chance; one that falls counts as kept, since KL sees errors that happen to help.
Recall is what is left of the baseline's, where it was measured.
"""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """From the best to the worst: (in words, most mean KL, most perplexity change, least recall kept)."""

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
        """`perplexity_change`: 0.01 is one per cent more."""
        for verdict in cls:
            if (
                kl_mean <= verdict.kl_mean
                and perplexity_change <= verdict.perplexity_change
                and recall_kept >= verdict.recall_kept
            ):
                return verdict
        return cls.BROKEN  # not even numbers
