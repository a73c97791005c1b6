"""`motley bench`: how fast a model reads a prompt and writes, by depth of context and KV cache type."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from motley.bench import SHAPES, Measurement, Workload, measure, read_bandwidth, write_random_model
from motley.cli import options
from motley.cli.bench_plot import draw
from motley.cli.console import reporting_errors, say, size, stdout, steps_bar
from motley.cli.grouping import with_groups
from motley.cli.inputs import check_writable, resolve_model, write_file
from motley.cli.loading import CrewOptions
from motley.errors import ConfigError
from motley.llm import LLM

PromptTokens = Annotated[
    str, typer.Option("-p", "--n-prompt", metavar="N,…", help="Prompt lengths; 0: none.")
]
NewTokens = Annotated[str, typer.Option("-n", "--n-gen", metavar="N,…", help="Tokens to decode; 0: none.")]
Depths = Annotated[str, typer.Option("-d", "--n-depth", metavar="N,…", help="Tokens of context before that.")]
Repetitions = Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Times each, after a warm-up.")]
Types = Annotated[
    str, typer.Option("--types", metavar="TYPES", help="KV cache types; K/V where they differ.")
]
ShapeName = Annotated[
    str | None,
    typer.Option("--shape", metavar="NAME", help=f"Random weights instead of a file: {', '.join(SHAPES)}."),
]
Weights = Annotated[
    str, typer.Option("--weights", metavar="FORMAT", help="With --shape: format of the matrices.")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Decode speed over depth, as SVG.")]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    k_type: str
    v_type: str
    measurement: Measurement
    bandwidth: float

    def as_json(self) -> dict[str, Any]:
        m = self.measurement
        return {
            "type_k": self.k_type,
            "type_v": self.v_type,
            "test": m.workload.name,
            **asdict(m.workload),
            "tokens_per_second": m.rate,
            "spread": m.spread,
            "seconds": list(m.seconds),
            "bytes_per_token": m.bytes_per_token,
            "roofline_percent": m.roofline_percent(self.bandwidth),
        }


@with_groups
def bench(
    model: options.Model = None,
    model_flag: options.ModelFlag = None,
    shape: ShapeName = None,
    weights: Weights = "Q8_0",
    n_prompt: PromptTokens = "512",
    n_gen: NewTokens = "32",
    depths: Depths = "0",
    types: Types = "f16",
    repetitions: Repetitions = 3,
    chosen: CrewOptions = CrewOptions(),
    plot: Plot = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure speed: prompt and decoding, at depths of context, by KV cache type.

    Decoding is bound by memory: the last column says how much of the bandwidth measured in the same run it uses,
    counting weights and cached keys and values once for each token. Depth is filled with random keys and values.

    \b
    [bold]motley bench model.gguf -p 512 -n 64 -d 0,8192 --types f16,q8_0,q4_0[/]
    [bold]motley bench --shape llama-1b --weights Q4_0 --plot speed.svg[/]
    """
    with reporting_errors(debug):
        check_writable(plot)
        path = resolve_model(model, model_flag) if shape is None else random_model(shape, weights)
        workloads = [
            Workload(n, is_prompt, depth)
            for depth in _numbers("-d", depths)
            for is_prompt, tokens in ((True, _numbers("-p", n_prompt)), (False, _numbers("-n", n_gen)))
            for n in tokens
            if n
        ]
        if not workloads:
            raise ConfigError("there is nothing to measure", hint="give -p or -n a number above 0")
        bandwidth = read_bandwidth(chosen.threads or torch.get_num_threads())
        pairs = [_pair(kind) for kind in types.split(",")]
        rows = _measure(path, pairs, workloads, repetitions, chosen, bandwidth)
        if plot is not None:
            write_file(plot, draw([(r.k_type, r.v_type, r.measurement) for r in rows], path.name))
    if as_json:
        typer.echo(
            json.dumps({"model": path.name, "bandwidth": bandwidth, "rows": [r.as_json() for r in rows]})
        )
    else:
        stdout().print(_table(rows, path, bandwidth))


def random_model(shape: str, weights: str) -> Path:
    """A random model of that shape, kept in the temporary folder for the next time."""
    path = Path(tempfile.gettempdir()) / f"motley-{shape}-{weights.upper()}.gguf"
    if not path.exists():
        say(f"writing random weights to {path}")
        unfinished = path.with_suffix(".part")
        write_random_model(unfinished, shape, weights)
        unfinished.rename(path)
    return path


def _measure(
    path: Path,
    pairs: list[tuple[str, str]],
    workloads: list[Workload],
    repetitions: int,
    chosen: CrewOptions,
    bandwidth: float,
) -> list[Row]:
    n_ctx = chosen.ctx_size or max(w.depth + w.n_tokens for w in workloads)
    rows = []
    with steps_bar("Measuring", len(pairs) * len(workloads)) as advance:
        for k_type, v_type in pairs:
            arguments = chosen.arguments() | {"n_ctx": n_ctx, "n_parallel": 1, "prefix_cache": False}
            with LLM(path, cache_type_k=k_type, cache_type_v=v_type, **arguments) as llm:
                for workload in workloads:
                    (measurement,) = measure(llm, [workload], repetitions)
                    rows.append(Row(k_type, v_type, measurement, bandwidth))
                    advance(f"{k_type}/{v_type} {workload.name}: {measurement.rate:.1f} t/s")
    return rows


def _table(rows: list[Row], path: Path, bandwidth: float) -> Table:
    title = f"{path.name}, read bandwidth {bandwidth / 1e9:.1f} GB/s"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("K / V")
    table.add_column("test")
    for name in ("tokens/s", "±", "bytes a token", "of the roofline"):
        table.add_column(name, justify="right")
    for row in rows:
        m = row.measurement
        percent = m.roofline_percent(row.bandwidth)
        moved = "" if m.workload.is_prompt else size(m.bytes_per_token)
        cells = (f"{m.rate:.2f}", f"{m.spread:.2f}", moved, "" if percent is None else f"{percent:.0f} %")
        table.add_row(f"{row.k_type} / {row.v_type}", m.workload.name, *cells)
    return table


def _pair(text: str) -> tuple[str, str]:
    """`q8_0` or `q8_0/q4_0`: the types of K and V."""
    k_type, *rest = text.strip().split("/")
    if len(rest) > 1:
        raise ConfigError(f"--types: {text!r} names more than K and V", hint="for example q8_0/q4_0")
    return k_type, rest[0] if rest else k_type


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise ConfigError(f"{flag} {text!r} is no list of numbers", hint="for example 0,4096")
    return numbers
