"""Measures a model with fewer or more experts and with fewer layers, on the same tokens in the same context.

The model is loaded once: how many experts a token uses, and how many layers run, belong to the request. Speed is
measured in rounds over all efforts, so that other load on the machine affects all of them alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt

from motley.errors import ConfigError
from motley.llm import LLM
from motley.models import DecoderParams
from motley.quality.divergence import Divergence, RowDivergence
from motley.quality.perplexity import Score, scored_rows, second_half_nll
from motley.quality.sweep import IN_MEMORY, Evaluation, ReferenceLogits

_MAX_DECODED = 32  # tokens of one timed run
_ROUNDS = 5


@dataclass(frozen=True)
class EffortChoice:
    """Experts that each token uses and layers that run, as numbers."""

    n_experts: int  # 0: the model has no experts
    n_layers: int

    def describe(self) -> str:
        layers = f"{self.n_layers} layers"
        return f"{self.n_experts} experts, {layers}" if self.n_experts else layers


@dataclass(frozen=True)
class EffortQuality:
    """The quality and the speed of one effort."""

    choice: EffortChoice
    bytes_per_token: int  # weights, keys and values that a token in the middle of the context reads
    tokens_per_second: float  # decoding: the median round
    tokens_per_second_spread: float  # half the difference between the fastest and the slowest round
    perplexity: float
    perplexity_error: float  # one standard error
    perplexity_change: float  # 0.01: one per cent more than the full model's
    perplexity_change_error: float  # one standard error; small, since both score the same tokens
    divergence: Divergence


@dataclass(frozen=True)
class EffortReport:
    """The comparison of all efforts with the full model."""

    n_ctx: int
    n_scored: int  # tokens
    full: EffortQuality
    efforts: tuple[EffortQuality, ...]


def full_effort(params: DecoderParams) -> EffortChoice:
    return EffortChoice(0 if params.experts is None else params.experts.n_used, params.n_layers)


def choose_efforts(
    params: DecoderParams,
    experts: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    *,
    is_grid: bool = False,
) -> list[EffortChoice]:
    """The efforts to measure beside the full model: each number of experts, then each number of layers; with `is_grid`
    each number of experts with each number of layers. ConfigError for a number that the model does not allow.

    Default, if neither is given: powers of two up to twice the file's number of experts, and eighths of the layers.
    """
    full = full_effort(params)
    if experts is None and layers is None:
        experts, layers = _usual_experts(params), _usual_layers(params)
    experts, layers = experts or [], layers or []
    n_experts = 0 if params.experts is None else params.experts.n_usable
    if experts and not n_experts:
        raise ConfigError("the model has no experts to choose from", hint="leave out --experts")
    _require("--experts", experts, n_experts)
    _require("--layers", layers, params.n_layers)
    if is_grid:
        pairs = [(k, n) for k in [full.n_experts, *experts] for n in [full.n_layers, *layers]]
    else:
        pairs = [(k, full.n_layers) for k in experts] + [(full.n_experts, n) for n in layers]
    chosen = [choice for choice in dict.fromkeys(EffortChoice(*pair) for pair in pairs) if choice != full]
    if not chosen:
        raise ConfigError(
            f"nothing to compare: the full model has {full.describe()}", hint="give other numbers"
        )
    return chosen


def measure_efforts(
    model: str | os.PathLike[str],
    evaluation: Evaluation,
    full: EffortChoice,
    choices: Sequence[EffortChoice],
    *,
    advance: Callable[[str], None] = lambda name: None,
    **options: Any,
) -> EffortReport:
    """The report on the full model and each choice. `options` are passed to `LLM`. `advance` is called with the name of
    an effort: `len(evaluation.chunks)` times for each, and once more after its speed.
    """
    settings = {"n_ctx": evaluation.n_ctx, "n_parallel": 1, "prefix_cache": False, "spec": "off"}
    with (
        SpooledTemporaryFile(max_size=IN_MEMORY) as file,
        LLM(model, **options | settings) as llm,
    ):
        reference = ReferenceLogits(file)
        runs = [_EffortRun.of(choice, llm, evaluation, reference, advance) for choice in (full, *choices)]
        rates = _decoding_rates(llm, evaluation.n_ctx, [run.choice for run in runs], advance)
        n_context = evaluation.n_ctx // 2
        first = runs[0]
        rows = [
            run.against(first, llm.token_bytes(n_context, **_arguments(run.choice)), each)
            for run, each in zip(runs, rates, strict=True)
        ]
    return EffortReport(evaluation.n_ctx, first.nll.size, rows[0], tuple(rows[1:]))


@dataclass(frozen=True, eq=False)
class _EffortRun:
    """One effort's predictions, before they are compared with the full model's."""

    choice: EffortChoice
    nll: npt.NDArray[np.float64]  # one for each scored token
    divergence: Divergence

    @classmethod
    def of(
        cls,
        choice: EffortChoice,
        llm: LLM,
        evaluation: Evaluation,
        reference: ReferenceLogits,
        advance: Callable[[str], None],
    ) -> _EffortRun:
        """Scores the chunks. The first run stores the reference logits."""
        nll, rows = [], []
        for number, chunk in enumerate(evaluation.chunks):
            logits = llm.logits(chunk, **_arguments(choice))
            nll.append(second_half_nll(logits, chunk))
            scored = scored_rows(logits)
            rows.append(RowDivergence.between(reference.get(number, scored), scored))
            advance(choice.describe())
        return cls(choice, np.concatenate(nll), RowDivergence.join(rows).summary())

    def against(self, full: _EffortRun, n_bytes: int, rates: Sequence[float]) -> EffortQuality:
        score = Score() + self.nll
        ratio = Score() + (self.nll - full.nll)  # its perplexity is the ratio of the two perplexities
        return EffortQuality(
            self.choice,
            n_bytes,
            median(rates),
            (max(rates) - min(rates)) / 2,
            score.perplexity,
            score.error,
            ratio.perplexity - 1,
            ratio.error,
            self.divergence,
        )


def _decoding_rates(
    llm: LLM, n_ctx: int, choices: Sequence[EffortChoice], advance: Callable[[str], None]
) -> list[list[float]]:
    """Tokens per second of each effort in each round, from the middle of the context on."""
    n_context = n_ctx // 2
    n_tokens = min(_MAX_DECODED, n_ctx - n_context - 1)
    rates: list[list[float]] = [[] for _ in choices]
    for number in range(1 + _ROUNDS):
        for choice, own in zip(choices, rates, strict=True):
            with llm.raw_sequence(**_arguments(choice)) as sequence:
                sequence.fill_with_random(n_context)
                started = time.perf_counter()
                sequence.follow(1, n_tokens)
                if number:  # the first round makes plans
                    own.append(n_tokens / (time.perf_counter() - started))
            if number == _ROUNDS:
                advance(choice.describe())
    return rates


def _arguments(choice: EffortChoice) -> dict[str, Any]:
    return {"n_expert_used": choice.n_experts or None, "n_layer_exit": choice.n_layers}


def _usual_experts(params: DecoderParams) -> list[int]:
    if params.experts is None:
        return []
    most = min(2 * params.experts.n_used, params.experts.n_usable)
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _usual_layers(params: DecoderParams) -> list[int]:
    return sorted({max(1, params.n_layers * eighths // 8) for eighths in range(1, 8)} - {params.n_layers})


def _require(flag: str, numbers: Iterable[int], maximum: int) -> None:
    for number in numbers:
        if not 1 <= number <= maximum:
            raise ConfigError(f"{flag} {number} is not possible", hint=f"it must be from 1 to {maximum}")
