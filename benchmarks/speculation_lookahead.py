"""Lookahead as a tree against lookahead as a chain: tokens a step, and rows a step, with all drafts computed.

    python -m benchmarks speculation --lookahead 7,5,7 --workloads json,story

A step's time depends on the machine and on the number of rows, tokens a step on the model and the text alone: so this
table is the same everywhere. Texts are compared with those of a run without drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.speculation_machine import Scripted
from benchmarks.speculation_texts import Sample
from motley.engine import Engine, Request
from motley.engine.drafting import ChainLookahead, Lookahead, Speculator
from motley.engine.drafting.control import FixedControl
from motley.engine.drafting.lookahead import LookaheadSizes
from motley.engine.service import TURN_SECONDS

_FORMS = {"chain": ChainLookahead, "tree": Lookahead}


@dataclass(frozen=True)
class FormResult:
    workload: str
    sizes: str
    form: str
    tokens_per_step: float
    rows_per_step: float
    n_different: int  # texts that differ from those without drafts


def measure_forms(
    engine: Engine, scripted: Scripted, workload: str, samples: Sequence[Sample], sizes: str
) -> list[FormResult]:
    """Both forms on the same samples, one request at a time."""
    without = [_run(engine, scripted, sample, "off").generated for sample in samples]
    results, before = [], engine.speculator
    for form, kind in _FORMS.items():
        engine.speculator = Speculator(
            [kind(LookaheadSizes.read(sizes))],
            spec="lookahead",
            n_vocab=engine.n_vocab,
            control=FixedControl(),
        )
        found = [_run(engine, scripted, sample, "lookahead") for sample in samples]
        n_steps = sum(request.n_steps for request in found)
        n_drafted = sum(count.drafted for request in found for count in request.drafts.values())
        results.append(
            FormResult(
                workload,
                sizes,
                form,
                sum(request.n_generated for request in found) / n_steps,
                1 + n_drafted / n_steps,
                sum(request.generated != text for request, text in zip(found, without, strict=True)),
            )
        )
    engine.speculator = before
    return results


def _run(engine: Engine, scripted: Scripted, sample: Sample, spec: str) -> Request:
    scripted.texts.clear()
    request = engine.add(sample.prompt, sample.params(speculative=spec))
    if sample.answer is not None:
        scripted.texts[id(request.sampler)] = sample.answer
    while engine.has_work:
        engine.step(TURN_SECONDS)
    if request.finish_reason == "failed":
        sys.exit(f"{spec}: a request failed")
    return request


def show(results: Sequence[FormResult]) -> str:
    lines = ["| workload | W,N,G | form | tokens a step | rows a step |", "|---|---|---|---|---|"]
    for r in results:
        differs = f" ({r.n_different} texts differ)" if r.n_different else ""
        lines.append(
            f"| {r.workload} | {r.sizes} | {r.form} | **{r.tokens_per_step:.2f}**{differs} | {r.rows_per_step:.1f} |"
        )
    return "\n".join(lines)
