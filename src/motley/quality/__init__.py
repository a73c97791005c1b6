"""Measures the quality of a model's predictions, and the loss by each KV cache type and by each effort.

perplexity   how well a text is predicted
divergence   how far one run's predictions are from another's
needles      whether the model recalls a sentence in its context
choices      which cache types to measure
sweep        all of the above, for each cache type, on the same tokens
efforts      perplexity, divergence and speed with fewer experts or layers
verdict      the figures as a plain sentence
"""

from __future__ import annotations

from motley.quality.choices import CacheChoice, applicable, parse_choice, parse_choices
from motley.quality.divergence import Divergence, compare
from motley.quality.efforts import (
    EffortChoice,
    EffortQuality,
    EffortReport,
    choose_efforts,
    full_effort,
    measure_efforts,
)
from motley.quality.needles import Recall, measure_recall
from motley.quality.perplexity import Score, read_chunks, second_half_nll
from motley.quality.sweep import Evaluation, Report, TypeQuality, measure_types
from motley.quality.verdict import Verdict

__all__ = [
    "CacheChoice",
    "Divergence",
    "EffortChoice",
    "EffortQuality",
    "EffortReport",
    "Evaluation",
    "Recall",
    "Report",
    "Score",
    "TypeQuality",
    "Verdict",
    "applicable",
    "choose_efforts",
    "compare",
    "full_effort",
    "measure_efforts",
    "measure_recall",
    "measure_types",
    "parse_choice",
    "parse_choices",
    "read_chunks",
    "second_half_nll",
]
