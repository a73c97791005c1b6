"""What drafts cost where they do not help: drafts switched on and off every few steps, within the same answers.

    python -m benchmarks speculation --within --workloads random,story --requests 1

Whole runs of a small model vary by more than such drafts cost. Here each period of a few steps with drafts is compared
with its neighbour without; the same with drafts on neither side shows what the method itself says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.speculation_machine import Scripted
from benchmarks.speculation_texts import Sample
from motley.engine import Engine
from motley.engine.drafting import Speculator
from motley.engine.service import TURN_SECONDS

PERIOD = 4  # steps


@dataclass(frozen=True)
class WithinResult:
    workload: str
    drafter: str
    n_requests: int
    n_pairs: int
    ratio: float  # tokens per second with drafts : without, the median of neighbours
    of_medians: float  # of the median seconds a token
    control: float  # the median of neighbours, both without drafts


def measure_within(
    engine: Engine,
    scripted: Scripted,
    workload: str,
    samples: Sequence[Sample],
    spec: str,
    n_rounds: int,
) -> WithinResult:
    pairs, same = [], []
    for number in range(n_rounds + 1):
        for kind, found in ((spec, pairs), ("off", same)):
            periods = _periods(engine, scripted, samples, kind, is_first=bool(number % 2))
            if number:  # the first round makes plans
                found += periods
    with_drafts, without = ([pair[i] for pair in pairs] for i in (0, 1))
    return WithinResult(
        workload,
        spec,
        len(samples),
        len(pairs),
        median(b / a for a, b in pairs),
        median(without) / median(with_drafts),
        median(b / a for a, b in same),
    )


def _periods(
    engine: Engine, scripted: Scripted, samples: Sequence[Sample], spec: str, *, is_first: bool
) -> list[tuple[float, float]]:
    """Seconds a token of neighbouring periods: with `spec`, without drafts. `is_first`: the first one has drafts."""
    scripted.texts.clear()
    requests = [engine.add(s.prompt, s.params(speculative=spec)) for s in samples]
    for request, sample in zip(requests, samples, strict=True):
        if sample.answer is not None:
            scripted.texts[id(request.sampler)] = sample.answer
    while not all(request.generated or request.is_finished for request in requests):
        engine.step(TURN_SECONDS)
    speculator, none = engine.speculator, Speculator()
    is_on, found = is_first, []
    while engine.has_work:
        engine.speculator = speculator if is_on else none
        n_before = sum([len(request.generated) for request in requests])
        n_running = len(engine.scheduler.running)
        started = time.perf_counter()
        for _ in range(PERIOD):
            engine.step(TURN_SECONDS)
        seconds = time.perf_counter() - started
        n_tokens = sum([len(request.generated) for request in requests]) - n_before
        if len(engine.scheduler.running) != n_running or not n_tokens:
            break  # a request has ended: the period is not comparable with others
        found.append((is_on, seconds / n_tokens))
        is_on = not is_on
    engine.speculator = speculator
    while engine.has_work:
        engine.step(TURN_SECONDS)
    return _paired(found)


def _paired(found: Sequence[tuple[bool, float]]) -> list[tuple[float, float]]:
    """Each period with the next one, (with drafts, without)."""
    return [(a, b) if is_on else (b, a) for (is_on, a), (_, b) in zip(found[::2], found[1::2], strict=False)]


def show(results: Sequence[WithinResult]) -> str:
    lines = [
        "| workload | drafter | requests | pairs | with : without, median | of the medians | neither side |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.workload} | {r.drafter} | {r.n_requests} | {r.n_pairs} | **{r.ratio:.3f}** "
        f"| {r.of_medians:.3f} | {r.control:.3f} |"
        for r in results
    ]
    return "\n".join(lines)
