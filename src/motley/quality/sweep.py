"""Measures cache types one after another, on the same tokens in the same context; only the type differs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from motley.bundled import RecallPrompt, make_recall_prompts
from motley.gguf import read_spec
from motley.llm import LLM
from motley.models import read_params
from motley.quality.choices import CacheChoice, applicable
from motley.quality.divergence import Divergence, Logits, RowDivergence
from motley.quality.needles import ANSWER_ROOM, Recall, measure_recall
from motley.quality.perplexity import Score, read_chunks, scored_rows, second_half_nll
from motley.quality.verdict import Verdict
from motley.text import Tokenizer

IN_MEMORY = 256 << 20  # bytes of reference logits; larger ones are stored on disk

Advance = Callable[[str], None]
"""Called after each step of an evaluation with the name of the type that took it."""


@dataclass(frozen=True)
class Evaluation:
    """The tests that every type takes: chunks of text to score, and needles to recall."""

    n_ctx: int
    chunks: tuple[tuple[int, ...], ...]  # each of n_ctx tokens, read from an empty cache
    needles: tuple[RecallPrompt, ...] = ()

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        text: str,
        *,
        n_ctx: int,
        max_chunks: int | None = None,
        n_needles: int = 0,
        seed: int = 0,
    ) -> Evaluation:
        """An evaluation of the first chunks of a text, and of needles hidden in passages that fill the context."""
        chunks = read_chunks(tokenizer, text, n_ctx, max_chunks)
        needles: list[RecallPrompt] = []
        if n_needles:
            length = max(0, n_ctx - ANSWER_ROOM)
            needles = make_recall_prompts(tokenizer.encode, text, n_needles, length, seed)
        return cls(n_ctx, tuple(map(tuple, chunks)), tuple(needles))

    @property
    def n_steps(self) -> int:
        return len(self.chunks) + len(self.needles)


@dataclass(frozen=True)
class TypeQuality:
    """The quality and the memory of one type."""

    choice: CacheChoice
    bytes_per_token: float  # K and V in all layers, by the table of types, without padding
    bytes_per_token_allocated: float  # the same, as allocated
    perplexity: float
    perplexity_error: float  # one standard error
    perplexity_change: float  # 0.01: one per cent more than the baseline's
    perplexity_change_error: float  # one standard error; small, since both score the same tokens
    divergence: Divergence
    recall: Recall | None
    verdict: Verdict


@dataclass(frozen=True)
class Report:
    """The comparison of all types with one baseline."""

    n_ctx: int
    n_scored: int  # tokens
    baseline: TypeQuality
    types: tuple[TypeQuality, ...]


def measure_types(
    model: str | os.PathLike[str],
    evaluation: Evaluation,
    choices: Sequence[CacheChoice],
    *,
    baseline: CacheChoice = CacheChoice("f32", "f32"),
    advance: Advance = lambda name: None,
    **options: Any,
) -> Report:
    """The report on the baseline and each choice. `options` are passed to `LLM`; each type loads the model again.

    If no rotation fits the model's heads, each type is measured once, without rotation.
    """
    choices = applicable(choices, read_params(read_spec(model)))
    with SpooledTemporaryFile(max_size=IN_MEMORY) as file:
        reference = ReferenceLogits(file)

        def evaluate(choice: CacheChoice) -> EvalRun:
            with LLM(
                model,
                n_ctx=evaluation.n_ctx,
                n_parallel=1,
                cache_type_k=choice.k,
                cache_type_v=choice.v,
                kv_rotation=choice.is_rotated,
                state_type=choice.state,
                prefix_cache=False,
                **options,
            ) as llm:
                return EvalRun.of(choice, llm, evaluation, reference, lambda: advance(choice.name))

        first = evaluate(baseline)
        others = [evaluate(choice) for choice in choices]
    return Report(
        evaluation.n_ctx,
        first.nll.size,
        first.against(first),
        tuple(sitting.against(first) for sitting in others),
    )


@dataclass(frozen=True, eq=False)
class EvalRun:
    """One type's results, before they are compared with the baseline's."""

    choice: CacheChoice
    nll: npt.NDArray[np.float64]  # one for each scored token
    divergence: Divergence
    recall: Recall | None
    bytes_per_token: float
    bytes_per_token_allocated: float

    @classmethod
    def of(
        cls,
        choice: CacheChoice,
        llm: LLM,
        evaluation: Evaluation,
        reference: ReferenceLogits,
        advance: Callable[[], None],
    ) -> EvalRun:
        """Runs the evaluation with one type. The first run stores the reference logits."""
        nll, rows = [], []
        for number, chunk in enumerate(evaluation.chunks):
            logits = llm.logits(chunk)
            nll.append(second_half_nll(logits, chunk))
            scored = scored_rows(logits)
            rows.append(RowDivergence.between(reference.get(number, scored), scored))
            advance()
        layout = llm.kv_stats().layout
        return cls(
            choice,
            np.concatenate(nll),
            RowDivergence.join(rows).summary(),
            measure_recall(llm, evaluation.needles, advance) if evaluation.needles else None,
            layout.bytes_per_token,
            layout.bytes_per_token_allocated,
        )

    def against(self, baseline: EvalRun) -> TypeQuality:
        score = Score() + self.nll
        ratio = Score() + (self.nll - baseline.nll)  # its perplexity is the ratio of the two perplexities
        change = ratio.perplexity - 1
        return TypeQuality(
            self.choice,
            self.bytes_per_token,
            self.bytes_per_token_allocated,
            score.perplexity,
            score.error,
            change,
            ratio.error,
            self.divergence,
            self.recall,
            Verdict.of(self.divergence.kl_mean, change - ratio.error, self._recall_kept(baseline)),
        )

    def _recall_kept(self, baseline: EvalRun) -> float:
        if self.recall is None or baseline.recall is None or not baseline.recall.n_found:
            return 1.0  # not measured, or the baseline found none: no loss
        return self.recall.share / baseline.recall.share


class ReferenceLogits:
    """The baseline's logits of each chunk, in a file, because they may not fit into memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._places: list[tuple[int, tuple[int, ...]]] = []  # of each chunk: offset, shape

    def get(self, number: int, logits: Logits) -> Logits:
        """The reference logits of a chunk. If there are none yet, `logits` become them; chunks must come in order."""
        if number == len(self._places):
            self._places.append((self._file.seek(0, os.SEEK_END), logits.shape))
            self._file.write(logits.tobytes())
        offset, shape = self._places[number]
        self._file.seek(offset)
        data = self._file.read(math.prod(shape) * logits.itemsize)
        return np.frombuffer(data, dtype=logits.dtype).reshape(shape)
