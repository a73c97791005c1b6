"""`motley bench`: speed of prompts and of decoding, by depth of context and KV cache type."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from motley import __version__
from motley.bench import (
    SHAPES,
    Measurement,
    SpecMeasurement,
    Workload,
    environment,
    measure,
    measure_speculation,
    random_model_path,
    read_bandwidth,
    write_random_model,
)
from motley.cli.bench_plot import Series, draw
from motley.cli.console import reporting_errors, say, stdout, steps_bar
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions, check_writable, write_file
from motley.cli.loading import say_kernels
from motley.cli.options.loading import CrewOptions
from motley.cli.options.output import Debug, Json
from motley.cli.options.speculation import ModelDraft
from motley.cli.svg import COLOURS
from motley.errors import ConfigError
from motley.formats import get_format
from motley.llm import LLM
from motley.runtime.defaults import batch_sizes
from motley.units import show_bytes

PromptTokens = Annotated[
    str, typer.Option("-p", "--n-prompt", metavar="N,…", help="Prompt lengths; 0: none.")
]
NewTokens = Annotated[str, typer.Option("-n", "--n-gen", metavar="N,…", help="Tokens to decode; 0: none.")]
Depths = Annotated[str, typer.Option("-d", "--n-depth", metavar="N,…", help="Tokens already in the context.")]
Repetitions = Annotated[
    int, typer.Option("-r", "--repetitions", metavar="N", min=1, help="Runs of each test, after a warm-up.")
]
Types = Annotated[
    str | None,
    typer.Option(
        "--types", metavar="TYPE,…", help="KV cache types; K/V if they differ: q8_0/q4_0. Default: f16."
    ),
]
KTypes = Annotated[
    str | None,
    typer.Option(
        "-ctk",
        "--cache-type-k",
        metavar="TYPE,…",
        help="Types of keys, each combined with each type of values.",
    ),
]
VTypes = Annotated[
    str | None,
    typer.Option(
        "-ctv",
        "--cache-type-v",
        metavar="TYPE,…",
        help="Types of values, each combined with each type of keys.",
    ),
]
ShapeName = Annotated[
    str | None,
    typer.Option("--shape", metavar="NAME", help=f"Random weights instead of a file: {', '.join(SHAPES)}."),
]
Weights = Annotated[
    str, typer.Option("--weights", metavar="FORMAT,…", help="With --shape: formats of the weights.")
]
Layers = Annotated[
    int | None,
    typer.Option("--layers", metavar="N", min=1, help="With --shape: the number of layers. Default: all."),
]
BenchSpec = Annotated[
    str | None,
    typer.Option(
        "--spec",
        metavar="NAMES",
        help="Also decode a text with these drafters (auto, lookup, draft, exit, mtp) and without, and compare.",
    ),
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Decode speed over depth, as SVG.")]


_PROMPT_ROOM = 256  # tokens of context for the prompt of --spec


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    weights: str  # format of the random model's matrices; "" for a model file
    k_type: str
    v_type: str
    measurement: Measurement
    bandwidth: float

    @property
    def cache(self) -> str:
        return self.k_type if self.k_type == self.v_type else f"{self.k_type}/{self.v_type}"

    def as_json(self) -> dict[str, Any]:
        m = self.measurement
        return {
            "weights": self.weights or None,
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


@dataclass(frozen=True)
class DraftedRow:
    """One row of the table of speculation."""

    weights: str
    cache: str
    measurement: SpecMeasurement

    def as_json(self) -> dict[str, Any]:
        m = self.measurement
        return {
            "weights": self.weights or None,
            "cache": self.cache,
            "drafters": m.drafters,
            "n_tokens": m.n_tokens,
            "tokens_per_second": median(m.with_drafts),
            "tokens_per_second_without": median(m.without),
            "ratio": m.ratio,
            "tokens_per_step": m.tokens_per_step,
            "drafts": {name: count._asdict() for name, count in m.drafts.items()},
        }


@dataclass(frozen=True)
class Trial:
    """The settings that are measured for each model."""

    pairs: list[tuple[str, str]]  # types of K and V
    workloads: list[Workload]
    repetitions: int
    n_batch: int
    spec: str | None = None  # drafters to measure
    draft_model: Path | None = None


@with_groups
def bench(
    source: ModelOptions = ModelOptions(),
    shape: ShapeName = None,
    layers: Layers = None,
    weights: Weights = "Q8_0",
    n_prompt: PromptTokens = "512",
    n_gen: NewTokens = "32",
    depths: Depths = "0",
    types: Types = None,
    k_types: KTypes = None,
    v_types: VTypes = None,
    repetitions: Repetitions = 3,
    spec: BenchSpec = None,
    model_draft: ModelDraft = None,
    chosen: CrewOptions = CrewOptions(),
    plot: Plot = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the speed of prompts and of decoding, by context depth, weight format and KV cache type.

    Decoding is limited by memory bandwidth. The last column shows how much of the bandwidth measured in the same run it
    uses, if weights and cached keys and values are read once per token. The context holds random keys and values.

    \b
    [bold]motley bench model.gguf -p 512 -n 64 -d 0,8192 --types f16,q8_0,q4_0[/]
    [bold]motley bench --shape llama-1b --weights Q8_0,Q4_0 -d 0,4096 --plot speed.svg[/]
    """
    with reporting_errors(debug, as_json=as_json):
        check_writable(plot)
        if shape is not None and source.given:
            raise ConfigError(f"two models: {source.given} and --shape {shape}", hint="give one of them")
        files = _files(shape, layers, weights, source.path())
        chosen = chosen.placed(next(iter(files.values())))
        crew, devices = chosen.crew(chosen.backend)
        if devices is not None:
            say(devices)
        trial = Trial(
            _pairs(types, k_types, v_types),
            _workloads(n_prompt, n_gen, depths),
            repetitions,
            batch_sizes(chosen.n_batch, 1, [device.name for device in crew.sharing])[0],
            spec,
            model_draft,
        )
        if model_draft is not None and spec is None:
            raise ConfigError("-md is for --spec", hint="for example --spec draft -md small.gguf")
        decoded = [workload.n_tokens for workload in trial.workloads if not workload.is_prompt]
        if spec is not None and min(decoded, default=0) < 2:
            raise ConfigError("--spec compares the tokens after the first", hint="give -n numbers above 1")
        bandwidth = read_bandwidth(crew, chosen.threads)
        rows, drafted = _measure(files, trial, chosen, bandwidth)
        name = shape or next(iter(files.values())).name
        if plot is not None:
            write_file(plot, draw(_series(rows), name))
    if as_json:
        head = {"model": name, "motley": __version__, **environment(crew), "bandwidth": bandwidth}
        found = {"rows": [r.as_json() for r in rows]}
        if drafted:
            found["speculation"] = [row.as_json() for row in drafted]
        typer.echo(json.dumps(head | found))
    else:
        stdout().print(_table(rows, name, bandwidth))
        if drafted:
            stdout().print(_drafted_table(drafted))


def _workloads(n_prompt: str, n_gen: str, depths: str) -> list[Workload]:
    workloads = [
        Workload(n, is_prompt, depth)
        for depth in _numbers("-d", depths)
        for is_prompt, tokens in ((True, _numbers("-p", n_prompt)), (False, _numbers("-n", n_gen)))
        for n in tokens
        if n
    ]
    if not workloads:
        raise ConfigError("there is nothing to measure", hint="give -p or -n a number above 0")
    return workloads


def _files(shape: str | None, layers: int | None, weights: str, model: Path) -> dict[str, Path]:
    """The models to measure, by format of their matrices: random models of `shape`, or `model` with the key ""."""
    if shape is None:
        if layers is not None:
            raise ConfigError(
                "--layers is for --shape", hint="--n-layer-exit runs the first layers of a file"
            )
        return {"": model}
    paths = {get_format(name).name: random_model_path(shape, name, layers) for name in weights.split(",")}
    for name, path in paths.items():
        if not path.exists():
            say(f"writing random weights to {path}")
            try:
                write_random_model(path, shape, name, n_layers=layers)
            except OSError as error:
                hint = "XDG_CACHE_HOME names the folder where random models are kept"
                raise ConfigError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    return paths


def _measure(
    files: dict[str, Path], trial: Trial, chosen: CrewOptions, bandwidth: float
) -> tuple[list[Row], list[DraftedRow]]:
    n_deepest = max(w.depth + w.n_tokens + _PROMPT_ROOM * (trial.spec is not None) for w in trial.workloads)
    cache: dict[str, Any] = {
        "n_ctx": chosen.ctx_size or n_deepest,
        "n_batch": trial.n_batch,
        "n_parallel": 1,
        "prefix_cache": False,
        "spec": trial.spec or "off",
        "draft_model": trial.draft_model,
    }
    rows, drafted = [], []
    with steps_bar("Measuring", len(files) * len(trial.pairs) * len(trial.workloads)) as advance:
        for weights, path in files.items():
            for k_type, v_type in trial.pairs:
                with LLM(path, cache_type_k=k_type, cache_type_v=v_type, **chosen.arguments() | cache) as llm:
                    say(f"{path.name}, {k_type} / {v_type}: loaded in {llm.load_seconds:.2f} s")
                    for detail in llm.details if chosen.verbose else ():
                        say(detail)
                    for workload in trial.workloads:
                        (measurement,) = measure(llm, [workload], trial.repetitions)
                        row = Row(weights, k_type, v_type, measurement, bandwidth)
                        rows.append(row)
                        advance(f"{weights} {row.cache} {workload.name}: {measurement.rate:.1f} t/s")
                    if trial.spec is not None:
                        for n in {w.n_tokens for w in trial.workloads if not w.is_prompt}:
                            found = measure_speculation(llm, trial.spec, n, trial.repetitions)
                            drafted.append(DraftedRow(weights, row.cache, found))
                    if (chosen.verbose and llm.warm_up.kernels) or llm.warm_up.failures:
                        say_kernels(llm.warm_up, is_verbose=chosen.verbose)
    return rows, drafted


def _series(rows: list[Row]) -> list[Series]:
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if not row.measurement.workload.is_prompt:
            point = (row.measurement.workload.depth, row.measurement.rate)
            points.setdefault(f"{row.weights} {row.cache}".strip(), []).append(point)
    return [
        Series(name, tuple(sorted(each)), COLOURS[number % len(COLOURS)])
        for number, (name, each) in enumerate(points.items())
    ]


def _table(rows: list[Row], name: str, bandwidth: float) -> Table:
    title = f"{name}, read bandwidth {bandwidth / 1e9:.1f} GB/s"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    names_weights = any(row.weights for row in rows)
    for column in (*(["weights"] if names_weights else []), "KV", "test"):
        table.add_column(column)
    for column in ("tokens/s", "±", "bytes a token", "GB/s", "of the roofline"):
        table.add_column(column, justify="right")
    for row in rows:
        m = row.measurement
        percent = m.roofline_percent(row.bandwidth)
        read = ("", "", "")
        if percent is not None:
            read = (
                show_bytes(m.bytes_per_token),
                f"{m.bytes_per_token * m.rate / 1e9:.1f}",
                f"{percent:.0f} %",
            )
        first = [row.weights] if names_weights else []
        table.add_row(*first, row.cache, m.workload.name, f"{m.rate:.2f}", f"{m.spread:.2f}", *read)
    return table


def _drafted_table(rows: list[DraftedRow]) -> Table:
    table = Table(
        title="speculation: a text that repeats itself, greedy", title_justify="left", box=box.SIMPLE_HEAD
    )
    for column in ("weights", "KV", "test", "drafters"):
        table.add_column(column)
    for column in ("tokens/s without", "with", "ratio", "tokens a step", "accepted"):
        table.add_column(column, justify="right")
    for row in rows:
        m = row.measurement
        table.add_row(
            *(row.weights, row.cache, f"tg{m.n_tokens}", m.drafters),
            *(f"{median(m.without):.2f}", f"{median(m.with_drafts):.2f}", f"{m.ratio:.2f}"),
            *(f"{m.tokens_per_step:.2f}", m.accepted),
        )
    return table


def _pairs(types: str | None, k_types: str | None, v_types: str | None) -> list[tuple[str, str]]:
    """Pairs of types of K and V, from --types or from llama-bench's flags."""
    if k_types is None and v_types is None:
        return [_pair(text) for text in (types or "f16").split(",")]
    if types is not None:
        raise ConfigError("--types is given beside -ctk or -ctv", hint="use one or the other")
    return list(product((k_types or "f16").split(","), (v_types or "f16").split(",")))


def _pair(text: str) -> tuple[str, str]:
    """The types of K and V named by `q8_0` or `q8_0/q4_0`."""
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
        raise ConfigError(f"{flag} {text!r} is not a list of numbers", hint="for example 0,4096")
    return numbers
