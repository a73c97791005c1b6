"""`motley effort-quality`: what fewer experts or fewer layers cost in quality and gain in speed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from motley.cli.console import reporting_errors, stdout, steps_bar
from motley.cli.effort_plot import draw
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions, check_writable, resolve_text, write_file
from motley.cli.options.loading import LoadOptions
from motley.cli.options.output import Debug, Json
from motley.cli.options.text import Chunks, File, Prompt
from motley.errors import ConfigError
from motley.gguf import read_spec
from motley.models import read_params
from motley.quality import (
    EffortChoice,
    EffortQuality,
    EffortReport,
    Evaluation,
    choose_efforts,
    full_effort,
    measure_efforts,
)
from motley.text import Tokenizer
from motley.units import show_bytes

_MANY_TIMES = 5  # a larger change of perplexity is shown as a factor
_N_CTX = 512  # as in `motley perplexity`, so that figures agree

Experts = Annotated[
    str | None,
    typer.Option(
        "--experts", metavar="N,…", help="Numbers of experts per token to measure, with all layers."
    ),
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", metavar="N,…", help="Numbers of layers to measure, with the file's experts."),
]
Grid = Annotated[
    bool, typer.Option("--grid", help="Measure each number of experts with each number of layers.")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the result as SVG.")]


@with_groups
def effort_quality(
    source: ModelOptions = ModelOptions(),
    prompt: Prompt = None,
    file: File = None,
    chunks: Chunks = 8,
    experts: Experts = None,
    layers: Layers = None,
    grid: Grid = False,
    chosen: LoadOptions = LoadOptions(),
    plot: Plot = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what fewer experts or layers cost in quality and gain in speed.

    Every effort reads the same tokens in the same context (512 tokens unless -c
    says otherwise). KL says how far the predictions are from those of the full
    model, in nats per token: on average, and what 99 % stay below. Bytes are the
    weights, keys and values that one token in the middle of the context reads;
    tokens/s is the speed of decoding from there. Default: powers of two of the
    experts, and eighths of the layers.

    \b
    [bold]motley effort-quality model.gguf -f wiki.test.raw --plot effort.svg[/]
    [bold]motley effort-quality model.gguf -f wiki.test.raw --experts 2,4,6[/]
    [bold]motley effort-quality model.gguf -f text.txt --experts 4 --layers 24,36 --grid[/]
    """
    with reporting_errors(debug, as_json=as_json):
        text = resolve_text(prompt, file)
        if text is None:
            raise ConfigError("there is no text to measure", hint="add -f FILE")
        if chosen.n_expert_used is not None or chosen.n_layer_exit is not None:
            raise ConfigError(
                "--n-expert-used and --n-layer-exit choose one effort", hint="use --experts and --layers"
            )
        check_writable(plot)
        path = source.path()
        spec = read_spec(path)
        params = read_params(spec)
        wanted = choose_efforts(
            params, _numbers("--experts", experts), _numbers("--layers", layers), is_grid=grid
        )
        evaluation = Evaluation.of(
            Tokenizer.from_spec(spec), text, n_ctx=chosen.ctx_size or _N_CTX, max_chunks=chunks
        )
        report = _measure(path, evaluation, full_effort(params), wanted, chosen)
        if plot is not None:
            write_file(plot, draw(report, path.name))
    if as_json:
        typer.echo(json.dumps(_as_json(report, path.name)))
    else:
        stdout().print(_table(report, path.name))


def _measure(
    path: Path,
    evaluation: Evaluation,
    full: EffortChoice,
    choices: list[EffortChoice],
    chosen: LoadOptions,
) -> EffortReport:
    arguments = replace(chosen, ctx_size=evaluation.n_ctx, parallel=1).placed(path).arguments()
    with steps_bar("Measuring", (len(evaluation.chunks) + 1) * (1 + len(choices))) as advance:
        return measure_efforts(path, evaluation, full, choices, advance=advance, **arguments)


def _numbers(flag: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is not a list of numbers", hint="for example 2,4,8") from None


def _table(report: EffortReport, model: str) -> Table:
    title = f"{model}: {report.n_scored} tokens scored in contexts of {report.n_ctx}, against the full model"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    names = [
        "layers",
        "bytes per token",
        "tokens/s",
        "±",
        "speed",
        "perplexity",
        "change",
        "KL mean",
        "KL 99 %",
    ]
    has_experts = bool(report.full.choice.n_experts)
    for name in [*(["experts"] if has_experts else []), *names, "same top"]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in (report.full, *report.efforts):
        first = [str(row.choice.n_experts)] if has_experts else []
        table.add_row(*first, *_figures(row, report.full))
    return table


def _figures(row: EffortQuality, full: EffortQuality) -> list[str]:
    return [
        str(row.choice.n_layers),
        show_bytes(row.bytes_per_token),
        f"{row.tokens_per_second:.1f}",
        f"{row.tokens_per_second_spread:.1f}",
        f"{row.tokens_per_second / full.tokens_per_second:.2f} ×",
        f"{_figure(row.perplexity, 4)} ± {_figure(row.perplexity_error, 2)}",
        "" if row is full else _change(row),
        f"{row.divergence.kl_mean:.2e}",
        f"{row.divergence.kl_p99:.2e}",
        f"{row.divergence.same_top:.2%}",
    ]


def _figure(value: float, digits: int) -> str:
    """`value` with so many digits, or with all digits before the point: 8.039, 399,100."""
    return f"{value:.{digits}g}" if value < 10 ** (digits - 1) else f"{value:,.0f}"


def _change(row: EffortQuality) -> str:
    change, error = row.perplexity_change, row.perplexity_change_error
    return f"{change:+.2%} ± {error:.2%}" if change < _MANY_TIMES else f"{1 + change:,.0f} ×"


def _as_json(report: EffortReport, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "n_ctx": report.n_ctx,
        "scored_tokens": report.n_scored,
        "full": asdict(report.full),
        "efforts": [asdict(row) for row in report.efforts],
    }
