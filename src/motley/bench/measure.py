"""Measures tokens per second of a prompt or of decoding, at a depth of context.

Contexts are filled with random keys and values, not computed: speed does not depend on the values, and a deep
context would take minutes to compute. The timed part is a pass through the model, logits included; decoding is
greedy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from motley.llm import LLM


@dataclass(frozen=True)
class Workload:
    """`n_tokens` at once (a prompt) or one after the other (decoding), after `depth` tokens of context."""

    n_tokens: int
    is_prompt: bool
    depth: int = 0

    @property
    def name(self) -> str:
        kind = f"pp{self.n_tokens}" if self.is_prompt else f"tg{self.n_tokens}"
        return f"{kind} @ d{self.depth}" if self.depth else kind


@dataclass(frozen=True)
class Measurement:
    """Seconds of each repetition, and the bytes that one decoded token has to read."""

    workload: Workload
    seconds: tuple[float, ...]
    bytes_per_token: int  # weights + keys and values at the workload's mean depth

    @property
    def rate(self) -> float:
        """Median tokens per second."""
        return self.workload.n_tokens / median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the difference between the fastest and the slowest repetition, in tokens per second."""
        rates = [self.workload.n_tokens / s for s in self.seconds]
        return (max(rates) - min(rates)) / 2

    def roofline_percent(self, bandwidth: float) -> float | None:
        """Bytes that decoding reads per second, in per cent of `bandwidth`; None for a prompt."""
        return None if self.workload.is_prompt else 100 * self.bytes_per_token * self.rate / bandwidth


def measure(llm: LLM, workloads: Sequence[Workload], repetitions: int = 3) -> list[Measurement]:
    """The measurements of each workload: `repetitions` times, after one warm-up."""
    return [_measure_one(llm, workload, repetitions) for workload in workloads]


def _measure_one(llm: LLM, workload: Workload, repetitions: int) -> Measurement:
    seconds = []
    for i in range(repetitions + 1):
        elapsed = _run(llm, workload)
        if i:  # the first run makes plans and warms caches
            seconds.append(elapsed)
    mean_depth = workload.depth + workload.n_tokens / 2
    return Measurement(workload, tuple(seconds), llm.token_bytes(mean_depth))


def _run(llm: LLM, workload: Workload) -> float:
    with llm.raw_sequence() as sequence:
        sequence.fill_with_random(workload.depth)
        _finish_stores()
        token = 1
        started = time.perf_counter()
        if workload.is_prompt:
            # Different tokens: equal tokens would all use the same experts.
            n_vocab = llm.engine.n_vocab  # a file may have no tokenizer
            sequence.feed([(token + 7919 * i) % n_vocab for i in range(workload.n_tokens)], n_outputs=1)
        else:
            sequence.follow(token, workload.n_tokens)
        return time.perf_counter() - started


def _finish_stores() -> None:
    """Waits until GPUs have stored a pretended context, so that this is not part of the measured time."""
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_allocated(device):
                torch.cuda.synchronize(device)
