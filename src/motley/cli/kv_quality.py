"""`motley kv-quality`: the loss of quality and the memory of each KV cache type."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from motley.bundled import bundled_model_path
from motley.cli.console import reporting_errors, say, stdout, steps_bar
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions, check_writable, resolve_text, write_file
from motley.cli.options.loading import CrewOptions
from motley.cli.options.output import Debug, Json
from motley.cli.options.text import Chunks, File, Prompt
from motley.cli.quality_plot import draw
from motley.errors import ConfigError
from motley.gguf import read_spec
from motley.models import read_params
from motley.quality import (
    CacheChoice,
    Evaluation,
    Report,
    TypeQuality,
    applicable,
    measure_types,
    parse_choice,
    parse_choices,
)
from motley.text import Tokenizer

_N_CTX = 512  # as in `motley perplexity`, so that figures agree


class Rotation(Enum):
    BOTH = "both"
    ON = "on"
    OFF = "off"

    @property
    def cases(self) -> tuple[bool, ...]:
        return {"both": (True, False), "on": (True,), "off": (False,)}[self.value]


Types = Annotated[
    str,
    typer.Option("--types", metavar="TYPE,…", help="KV cache types; K/V if they differ: q8_0/q4_0."),
]
Baseline = Annotated[
    str, typer.Option("--baseline", metavar="TYPE", help="The type that others are compared with.")
]
Rotated = Annotated[
    Rotation,
    typer.Option(
        "--rotation",
        metavar="both|on|off",
        help="Measure quantized types with rotation, without it, or both.",
    ),
]
WithRecall = Annotated[
    bool | None,
    typer.Option(
        "--recall/--no-recall",
        help="Hide sentences in the text and ask for them. Default: only for the bundled model, which was trained to "
        "answer.",
        show_default=False,
    ),
]
Needles = Annotated[
    int, typer.Option("--needles", metavar="N", min=1, help="How many hidden sentences to ask for.")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the result as SVG.")]


@with_groups
def kv_quality(
    source: ModelOptions = ModelOptions(),
    prompt: Prompt = None,
    file: File = None,
    chunks: Chunks = 8,
    types: Types = "f16,q8_0,q5_1,q4_0,iq4_nl,q8_0/q4_0",
    baseline: Baseline = "f32",
    rotation: Rotated = Rotation.BOTH,
    recall: WithRecall = None,
    needles: Needles = 20,
    chosen: CrewOptions = CrewOptions(),
    plot: Plot = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what each KV cache type costs in quality and saves in memory.

    Every type reads the same tokens in the same context (512 tokens unless -c
    says otherwise); only the cache differs. Perplexity is that of
    [bold]motley perplexity[/]. KL says how far the predictions are from the
    baseline's, in nats per token: on average, and what 99 % stay below. Bytes
    are for one token in all layers: by the table of types, and as allocated.

    \b
    as good as f16         KL up to 0.001, perplexity up to +0.1 %, 99 % of recall
    slightly worse         KL up to 0.01,  perplexity up to +1 %,   95 %
    noticeably worse       KL up to 0.1,   perplexity up to +10 %,  80 %
    broken for this model  more than that

    \b
    [bold]motley kv-quality model.gguf -f wiki.test.raw -c 2048 --plot kv.svg[/]
    [bold]motley kv-quality model.gguf -f wiki.test.raw --types q8_0,q8_0/q4_0[/]
    """
    with reporting_errors(debug, as_json=as_json):
        text = resolve_text(prompt, file)
        if text is None:
            raise ConfigError("there is no text to measure", hint="add -f FILE")
        check_writable(plot)
        path = source.path()
        is_asked = path == bundled_model_path() if recall is None else recall
        asked = parse_choices(types, rotation.cases)
        spec = read_spec(path)
        evaluation = Evaluation.of(
            Tokenizer.from_spec(spec),
            text,
            n_ctx=chosen.ctx_size or _N_CTX,
            max_chunks=chunks,
            n_needles=needles if is_asked else 0,
        )
        measured = applicable(asked, read_params(spec))
        if measured != asked:
            say("note: no rotation fits this model's heads; each type is measured once, without")
        report = _measure(path, evaluation, measured, parse_choice(baseline), chosen)
        if plot is not None:
            write_file(plot, draw(report, path.name))
    if as_json:
        typer.echo(json.dumps(_as_json(report, path.name)))
    else:
        stdout().print(_table(report, path.name))


def _measure(
    path: Path, evaluation: Evaluation, choices: list[CacheChoice], baseline: CacheChoice, chosen: CrewOptions
) -> Report:
    arguments = chosen.placed(path).arguments()
    del arguments["n_ctx"]  # the evaluation sets it
    with steps_bar("Measuring", evaluation.n_steps * (1 + len(choices))) as advance:
        return measure_types(path, evaluation, choices, baseline=baseline, advance=advance, **arguments)


def _table(report: Report, model: str) -> Table:
    table = Table(title=_headline(report, model), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("K/V type", no_wrap=True)
    table.add_column("rotated")
    for name in ("bytes per token", "allocated", "perplexity", "change", "KL mean", "KL 99 %", "same top"):
        table.add_column(name, justify="right")
    if report.baseline.recall is not None:
        table.add_column("recall", justify="right")
    table.add_column("verdict", no_wrap=True)
    for row in (report.baseline, *report.types):
        is_baseline = row is report.baseline
        table.add_row(*_figures(row), "baseline" if is_baseline else row.verdict.words)
    return table


def _headline(report: Report, model: str) -> str:
    return (
        f"{model}: {report.n_scored} tokens scored in contexts of {report.n_ctx}, "
        f"against a cache in {report.baseline.choice.name}"
    )


def _figures(row: TypeQuality) -> list[str]:
    recall = [] if row.recall is None else [f"{row.recall.n_found}/{row.recall.n_asked}"]
    return [
        row.choice.name,
        ("yes" if row.choice.is_rotated else "no") if row.choice.is_quantized else "",
        f"{row.bytes_per_token:,.0f}",
        f"{row.bytes_per_token_allocated:,.0f}",
        f"{row.perplexity:.4f}",
        f"{row.perplexity_change:+.3%} ± {row.perplexity_change_error:.3%}",
        f"{row.divergence.kl_mean:.2e}",
        f"{row.divergence.kl_p99:.2e}",
        f"{row.divergence.same_top:.2%}",
        *recall,
    ]


def _as_json(report: Report, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "n_ctx": report.n_ctx,
        "scored_tokens": report.n_scored,
        "baseline": _row_as_json(report.baseline),
        "types": [_row_as_json(row) for row in report.types],
    }


def _row_as_json(row: TypeQuality) -> dict[str, Any]:
    return asdict(row) | {"verdict": row.verdict.words}
