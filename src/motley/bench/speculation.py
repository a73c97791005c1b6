"""Measures decoding with and without drafts in the same engine: the same text, in alternating runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from motley.engine.request import DraftCount
from motley.llm import LLM

# Its second half repeats the first, as code that is changed or a text that is quoted does.
_PART = "The name of the first file is notes.txt. It has 12 lines, and the last line is empty.\n"
_PROMPT = f"{_PART}The name of the second file is list.txt. It has 30 lines.\n" * 2 + _PART
_N_IDS = 97  # of a prompt without a tokenizer


@dataclass(frozen=True)
class SpecMeasurement:
    """Tokens per second of each repetition, with drafts and without."""

    n_tokens: int
    drafters: str
    with_drafts: tuple[float, ...]
    without: tuple[float, ...]
    tokens_per_step: float
    drafts: Mapping[str, DraftCount]  # of the last repetition, by drafter

    @property
    def ratio(self) -> float:
        """The median ratio of neighbouring runs."""
        return median(a / b for a, b in zip(self.with_drafts, self.without, strict=True))

    @property
    def accepted(self) -> str:
        counts = (f"{name} {c.accepted} of {c.drafted}" for name, c in self.drafts.items() if c.drafted)
        return ", ".join(counts) or "no drafts"


def measure_speculation(llm: LLM, drafters: str, n_tokens: int, repetitions: int = 3) -> SpecMeasurement:
    """Greedy answers of `n_tokens` to a prompt that repeats itself, after one warm-up."""
    rates: dict[str, list[float]] = {drafters: [], "off": []}
    options: dict[str, Any] = {"temperature": 0, "max_tokens": n_tokens, "ignore_eos": True}
    prompt = (
        _PROMPT if llm.tokenizer.n_vocab else [i % _N_IDS % llm.engine.n_vocab for i in range(2 * _N_IDS)]
    )
    latest = None
    for number in range(repetitions + 1):
        for spec in sorted(rates, reverse=bool(number % 2)):
            answer = llm.generate(prompt, speculative=spec, **options)
            if number:  # the first run makes plans
                rates[spec].append(answer.timings.new_rate)
            if spec == drafters:
                latest = answer.timings
    assert latest is not None
    return SpecMeasurement(
        n_tokens,
        drafters,
        tuple(rates[drafters]),
        tuple(rates["off"]),
        latest.tokens_per_step,
        latest.drafts,
    )
