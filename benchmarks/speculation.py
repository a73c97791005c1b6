"""Speculation: speed with drafts against without, in one engine, by workload, drafter and number of requests.

Runs with and without drafts alternate; each ratio is of neighbours, and the table has the median. Every answer is
compared: the texts must be the same.

    python -m benchmarks speculation                          # the bundled model, one request
    python -m benchmarks speculation --requests 1,4,16,64 --drafters auto --plot speculation.svg
    python -m benchmarks speculation --shape llama-1b --right 0.6,0.8,0.9

*Written* texts (code, json, records, question) are beyond the bundled model. There the chooser does its work and then
returns the next token of the written text: cost and drafts are those of a model that writes it. *Own* texts (chat,
story, random) are the model's. `--right P` measures the machine's part alone: drafts of a written text, each token of
which is right with probability P.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.speculation_texts import WRITTEN, Sample, own_samples, written_samples
from motley import LLM
from motley.bench import SHAPES, random_model_path, write_random_model
from motley.bundled import bundled_draft_path, bundled_model_path
from motley.engine import Engine, Request
from motley.engine.choosing import ChoiceRow, Chooser, Pending, chooser_for
from motley.engine.drafting import Draft, Speculator
from motley.engine.drafting.draft import Ask

WORKLOADS = (*WRITTEN, "chat", "story", "random")


class Scripted:
    """A chooser that chooses as always, and returns the next token of a written text instead, where there is one."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self.texts: dict[int, tuple[int, ...]] = {}  # by id of the request's list of tokens

    def choose(self, logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> Pending:
        pending = self._chooser.choose(logits, rows)

        def tokens() -> list[Any]:
            found = pending.tokens()
            return [
                self.texts[id(row.history)][row.index] if id(row.history) in self.texts else token
                for row, token in zip(rows, found, strict=True)
            ]

        return Pending(tokens)


class SometimesRight:
    """Drafts a written text; each token is right with a given probability."""

    name = "lookup"
    priors = (0.7,)
    is_free = True
    is_usual = True
    writes_cache = False

    def __init__(self, scripted: Scripted, p_right: float) -> None:
        self._scripted, self._p, self._rng = scripted, p_right, random.Random(0)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft(self._tokens(request, n), self.name) for request, n in asks]

    def may_draft(self, request: Request) -> bool:
        return True

    def _tokens(self, request: Request, n: int) -> tuple[int, ...]:
        rest = self._scripted.texts[id(request.tokens)][request.n_generated :][:n]
        return tuple(token if self._rng.random() < self._p else token ^ 1 for token in rest)


@dataclass(frozen=True)
class Result:
    workload: str
    drafter: str
    n_requests: int
    ratio: float  # tokens per second with drafts : without, the median of neighbours
    best: float  # of the fastest runs: what other programs on the machine change least
    low: float  # of the ratios
    high: float
    rate: float  # tokens per second without
    tokens_per_step: float
    drafted: int
    accepted: int


def run(
    engine: Engine, samples: Sequence[Sample], spec: str, scripted: Scripted
) -> tuple[float, list[Request]]:
    """Seconds from the first token of the last request to the end, and the finished requests."""
    scripted.texts.clear()
    requests = [engine.add(s.prompt, s.params(speculative=spec)) for s in samples]
    for request, sample in zip(requests, samples, strict=True):
        if sample.answer is not None:
            scripted.texts[id(request.tokens)] = sample.answer
    while not all(request.generated or request.is_finished for request in requests):
        engine.step()
    n_before = sum(request.n_generated for request in requests)
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - started
    n_tokens = sum(request.n_generated for request in requests) - n_before
    return seconds / max(1, n_tokens), requests


def measure(
    engine: Engine,
    scripted: Scripted,
    workload: str,
    samples: Sequence[Sample],
    spec: str,
    n_rounds: int,
    label: str = "",
) -> Result:
    ratios, rates, last = [], [], []
    fastest = {"off": float("inf"), spec: float("inf")}
    for number in range(n_rounds + 1):
        first, second = ("off", spec) if number % 2 else (spec, "off")
        runs = {each: run(engine, samples, each, scripted) for each in (first, second)}
        texts = [[tuple(r.generated) for r in requests] for _, requests in runs.values()]
        if any(r.finish_reason == "failed" for _, requests in runs.values() for r in requests):
            raise SystemExit(f"{workload}, {spec}: a request failed")
        if texts[0] != texts[1]:
            print(f"{workload}, {spec}: the texts differ", file=sys.stderr)
        if number:  # the first round makes plans
            ratios.append(runs["off"][0] / runs[spec][0])
            rates.append(1 / runs["off"][0])
            fastest = {name: min(fastest[name], runs[name][0]) for name in fastest}
        last = runs[spec][1]
    counts = [count for request in last for count in request.drafts.values()]
    return Result(
        workload,
        label or spec,
        len(samples),
        median(ratios),
        fastest["off"] / fastest[spec],
        min(ratios),
        max(ratios),
        median(rates),
        sum(r.n_generated for r in last) / max(1, sum(r.n_steps for r in last)),
        sum(c.drafted for c in counts),
        sum(c.accepted for c in counts),
    )


def show(results: Sequence[Result]) -> str:
    lines = [
        "| workload | drafter | requests | with : without | range | of the fastest | tokens/s without "
        "| tokens a step | accepted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        share = f"{r.accepted} of {r.drafted}" if r.drafted else "no drafts"
        lines.append(
            f"| {r.workload} | {r.drafter} | {r.n_requests} | **{r.ratio:.2f}** | {r.low:.2f}–{r.high:.2f} "
            f"| {r.best:.2f} | {r.rate:.0f} | {r.tokens_per_step:.2f} | {share} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="default: the bundled model")
    parser.add_argument("--draft-model", type=Path, default=None, help="default: the bundled draft model")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights, with --right")
    parser.add_argument("--layers", type=int, help="of the shape")
    parser.add_argument(
        "--right", default="", metavar="P,…", help="drafts that are right with this probability"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafters", default="auto", help="by space: auto draft exit lookup,draft …")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--requests", default="1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=300, help="of each answer, at most")
    parser.add_argument("--draft-max", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args()
    numbers = [int(n) for n in chosen.requests.split(",")]
    drafters = chosen.drafters.split()
    options: dict[str, Any] = {"devices": chosen.device, "draft_max": chosen.draft_max}
    path = chosen.model or bundled_model_path()
    if chosen.shape:
        path = random_model_path(chosen.shape, "Q8_0", chosen.layers)
        if not path.exists():
            write_random_model(path, chosen.shape, "Q8_0", n_layers=chosen.layers)
    elif any("draft" in name for name in drafters):
        options["draft_model"] = chosen.draft_model or bundled_draft_path()
    results: list[Result] = []
    with LLM(path, n_ctx=2048, n_parallel=max(numbers), **options) as llm:
        engine = llm._loaded.engine
        gpus = [backend.device for backend in engine.runner._backends if backend.device.type == "cuda"]
        scripted = Scripted(chooser_for(gpus[0] if gpus else torch.device("cpu")))
        engine._chooser = scripted
        for workload in chosen.workloads.split(","):
            for n in numbers:
                make = written_samples if workload in WRITTEN else own_samples
                samples = make(llm.tokenizer, workload, n, chosen.tokens)
                for p in [float(text) for text in chosen.right.split(",") if text]:
                    engine.speculator = Speculator(
                        [SometimesRight(scripted, p)],
                        draft_max=chosen.draft_max or 15,
                        n_vocab=engine.n_vocab,
                    )
                    results.append(
                        measure(engine, scripted, workload, samples, "lookup", chosen.rounds, f"right {p:g}")
                    )
                for spec in drafters if not chosen.right else ():
                    results.append(measure(engine, scripted, workload, samples, spec, chosen.rounds))
                    print(show(results[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(f"{path.name}, {platform.processor() or platform.machine()}, {chosen.rounds} rounds\n")
    print(show(results))
    if chosen.json:
        chosen.json.write_text(json.dumps([vars(r) for r in results], indent=1) + "\n")
    if chosen.plot:
        from benchmarks.speculation_plot import draw

        chosen.plot.write_text(draw([vars(r) for r in results]))


if __name__ == "__main__":
    main()
