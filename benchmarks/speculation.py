"""Speculation: speed with drafts against without, in one engine, by workload, drafter and number of requests.

Runs with and without drafts alternate; each ratio is of neighbours, and the table has the median. Every answer is
compared: the texts must be the same.

    python -m benchmarks speculation                          # the bundled model, one request
    python -m benchmarks speculation --requests 1,4,16,64 --drafters auto --plot speculation.svg
    python -m benchmarks speculation --shape llama-1b --right 0.6,0.8,0.9 --depth 0,4096
    python -m benchmarks speculation --within --workloads random,story --rounds 20        # what they cost in vain
    python -m benchmarks speculation --lookahead "7,5,7 15,5,7" --workloads json,story    # tokens a step, both forms

*Written* texts (code, json, records, question) are beyond the bundled model. There the chooser does its work and then
returns the next token of the written text, also where one native call computes and chooses: cost and drafts are those
of a model that writes it. *Own* texts (chat, story, random, repeated) are the model's. `--right P` measures the
machine's part alone: drafts of which each token is right with probability P, at a depth of context
(speculation_machine.py).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import speculation_lookahead, speculation_machine, speculation_within
from benchmarks.speculation_machine import Scripted
from benchmarks.speculation_texts import WRITTEN, Sample, own_samples, written_samples
from motley import LLM
from motley.bench import SHAPES, random_model_path, write_random_model
from motley.bundled import bundled_draft_path, bundled_model_path
from motley.engine import Engine, Request, verifying
from motley.engine.choosing import Chooser, TokenOrError, chooser_for
from motley.engine.scheduler import Step
from motley.engine.service import TURN_SECONDS
from motley.engine.steady import Steady
from motley.engine.verifying import Chosen

WORKLOADS = (*WRITTEN, "chat", "story", "random")


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
            scripted.texts[id(request.sampler)] = sample.answer
    while not all(request.generated or request.is_finished for request in requests):
        engine.step(TURN_SECONDS)
    n_before = sum(request.n_generated for request in requests)
    started = time.perf_counter()
    while engine.has_work:
        engine.step(TURN_SECONDS)
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
    parser.add_argument("--weights", default="Q8_0", help="format of the shape's matrices")
    parser.add_argument("--layers", type=int, help="of the shape")
    parser.add_argument("--right", default="", metavar="P,…", help="drafts, right with this probability")
    parser.add_argument("--depth", default="0", metavar="N,…", help="tokens of context, with --right")
    parser.add_argument("--cache-type", default="f16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafters", default="auto", help="by space: auto draft exit lookup,draft …")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--requests", default="1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=300, help="of each answer, at most")
    parser.add_argument("--draft-max", type=int)
    parser.add_argument("--lookahead", default="", metavar="W,N,G …", help="compare lookahead's two forms")
    parser.add_argument("--within", action="store_true", help="switch drafts on and off within answers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args()
    if chosen.right:
        _measure_machine(chosen)
        return
    numbers = [int(n) for n in chosen.requests.split(",")]
    drafters = chosen.drafters.split()
    options: dict[str, Any] = {"devices": chosen.device, "draft_max": chosen.draft_max}
    path = chosen.model or bundled_model_path()
    if any("draft" in name for name in drafters):
        options["draft_model"] = chosen.draft_model or bundled_draft_path()
    results: list[Result] = []
    forms: list[speculation_lookahead.FormResult] = []
    within: list[speculation_within.WithinResult] = []
    cache = {"cache_type_k": chosen.cache_type, "cache_type_v": chosen.cache_type}
    with LLM(path, n_ctx=2048, n_parallel=max(numbers), **cache, **options) as llm:
        llm.finish_compiling()
        engine = llm._loaded.engine
        scripted = _script(engine)
        for workload in chosen.workloads.split(","):
            if chosen.lookahead:
                make = written_samples if workload in WRITTEN else own_samples
                samples = make(llm.tokenizer, workload, 4, chosen.tokens)
                for sizes in chosen.lookahead.split():
                    forms += speculation_lookahead.measure_forms(engine, scripted, workload, samples, sizes)
                continue
            for n in numbers:
                make = written_samples if workload in WRITTEN else own_samples
                samples = make(llm.tokenizer, workload, n, chosen.tokens)
                if chosen.within:
                    for spec in drafters:
                        within.append(
                            speculation_within.measure_within(
                                engine, scripted, workload, samples, spec, chosen.rounds
                            )
                        )
                    continue
                for spec in drafters:
                    results.append(measure(engine, scripted, workload, samples, spec, chosen.rounds))
                    print(show(results[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if forms or within:
        print(speculation_lookahead.show(forms) if forms else speculation_within.show(within))
        return
    print(f"{path.name}, {platform.processor() or platform.machine()}, {chosen.rounds} rounds\n")
    print(show(results))
    if chosen.json:
        chosen.json.write_text(json.dumps([vars(r) for r in results], indent=1) + "\n")
    if chosen.plot:
        from benchmarks.speculation_plot import draw

        chosen.plot.write_text(draw([vars(r) for r in results]))


def _measure_machine(chosen: argparse.Namespace) -> None:
    """Drafts that are right with a given probability, by depth of context."""
    depths, numbers = ([int(n) for n in text.split(",")] for text in (chosen.depth, chosen.requests))
    path = chosen.model or bundled_model_path()
    if chosen.shape:
        path = random_model_path(chosen.shape, chosen.weights, chosen.layers)
        if not path.exists():
            write_random_model(path, chosen.shape, chosen.weights, n_layers=chosen.layers)
    results = []
    n_ctx = max(depths) + chosen.tokens + 64
    cache = {"cache_type_k": chosen.cache_type, "cache_type_v": chosen.cache_type}
    with LLM(
        path, n_ctx=n_ctx, n_parallel=max(numbers), prefix_cache=False, devices=chosen.device, **cache
    ) as llm:
        print(f"loaded in {llm.load_seconds:.1f} s", file=sys.stderr, flush=True)
        llm.finish_compiling()
        scripted = _script(llm._loaded.engine)
        for depth in depths:
            for n in numbers:
                for text in chosen.right.split(","):
                    counts = {"n_tokens": chosen.tokens, "n_rounds": chosen.rounds, "n_requests": n}
                    results.append(
                        speculation_machine.measure_depth(llm, scripted, float(text), depth, **counts)
                    )
                    print(speculation_machine.show(results), flush=True)
                    if chosen.json:
                        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


def _script(engine: Engine) -> Scripted:
    """Makes the engine choose tokens of written texts."""
    gpus = [backend.device for backend in engine.runner._backends if backend.device.type == "cuda"]
    scripted = Scripted(chooser_for(gpus[0] if gpus else torch.device("cpu")))
    engine._chooser = scripted
    run, run_rows, choose_all = Steady.run, Steady.run_rows, verifying.choose_all

    def run_scripted(steady: Steady, n_rounds: int = 1) -> Chosen:
        """Repeated steps, which are computed and chosen in one native call."""
        starts = [len(request.generated) for request in steady.requests]
        run(steady, n_rounds)
        for row, (request, start) in enumerate(zip(steady.requests, starts, strict=True)):
            written = scripted.texts.get(id(request.sampler), ())[start:]
            for tokens, token in zip(steady._rounds, written, strict=False):
                tokens[row] = token
        return Chosen(list(steady._rounds[0]), {})

    def run_rows_scripted(steady: Steady) -> list[TokenOrError]:
        """The same with drafts."""
        found = run_rows(steady)
        rows = accumulate(steady._counts, initial=0)
        for request, n_rows, row in zip(steady.requests, steady._counts, rows, strict=False):
            _write(scripted, request, found, row, n_rows)
        return found

    def choose_scripted(
        chooser: Chooser, step: Step, ready: Sequence[Request], logits: torch.Tensor
    ) -> list[TokenOrError] | None:
        """The rows of a step with drafts, of which one native call chooses all."""
        found = choose_all(chooser, step, ready, logits)
        if found is None or step.trees:
            return found
        for request, row in zip(ready, verifying.first_rows(step, ready), strict=True):
            _write(scripted, request, found, row, 1 + step.n_drafted(request))
        return found

    Steady.run = run_scripted  # type: ignore[method-assign]
    Steady.run_rows = run_rows_scripted  # type: ignore[method-assign]
    verifying.choose_all = choose_scripted  # type: ignore[assignment]
    return scripted


def _write(scripted: Scripted, request: Request, found: list[TokenOrError], row: int, n_rows: int) -> None:
    """Replaces the tokens of a request's rows, from its next token on, by those of its written text."""
    start = len(request.generated)
    written = scripted.texts.get(id(request.sampler), ())[start : start + n_rows]
    found[row : row + len(written)] = written


if __name__ == "__main__":
    main()
