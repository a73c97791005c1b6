"""`motley inspect`: the contents of a model file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from motley.backends import backend_for_heads
from motley.cli.console import printable, reporting_errors, stdout
from motley.cli.grouping import with_groups
from motley.cli.inputs import ModelOptions
from motley.cli.options.output import Debug, Json
from motley.errors import MotleyError
from motley.gguf import ModelSpec, read_spec
from motley.gguf.inspect import Description, TensorRow, TypeRow, describe
from motley.models import DecoderParams, check_tensors, read_params
from motley.text import ChatTemplate, Tokenizer
from motley.units import show_bytes

_VALUE_CHARS = 200  # of a metadata value: more than a line shows, less than a chat template

Tensors = Annotated[bool, typer.Option("--tensors", help="List every tensor.")]


@with_groups
def inspect(
    source: ModelOptions = ModelOptions(),
    tensors: Tensors = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a model file contains, and whether Motley runs it: metadata, bytes by type, tensors.

    No weights are loaded, but sizes, tensors, vocabulary and chat template are checked as `motley run` does.

    \b
    [bold]motley inspect model.gguf --tensors[/]
    [bold]motley inspect model.gguf --json | jq .parameters[/]
    """
    with reporting_errors(debug, as_json=as_json):
        spec = read_spec(source.path())
        contents, found = describe(spec), check_model(spec)
    if as_json:
        typer.echo(json.dumps({**contents, **asdict(found)}, ensure_ascii=False))
        return
    console = stdout()
    console.print(_summary(contents, found))
    console.print(_metadata_table(contents["metadata"]))
    console.print(_type_table(contents["types"]))
    if tensors:
        console.print(_tensor_table(contents["tensors"]))


@dataclass(frozen=True)
class Findings:
    """Whether Motley runs a file, and what is wrong or remarkable about it."""

    runs: bool
    problem: str | None = None  # as `motley run` says it
    hint: str | None = None
    notes: tuple[str, ...] = ()


def check_model(spec: ModelSpec) -> Findings:
    """Checks all that `motley run` checks before it loads weights: sizes, tensors, vocabulary, chat template."""
    notes = []
    try:
        params = read_params(spec)
        notes.append(check_tensors(spec, params))
        notes.append(backend_for_heads("cpu", "auto", *_heads(params))[1])
        Tokenizer.from_spec(spec)
    except MotleyError as error:
        return Findings(False, error.message, error.hint)
    try:
        ChatTemplate.from_spec(spec)
    except MotleyError as error:
        notes.append(f"its chat template does not work: {error.message}")
    return Findings(True, notes=tuple(note for note in notes if note is not None))


def _heads(params: DecoderParams) -> tuple[int, int]:
    return params.head_dim, params.n_heads // params.n_kv_heads


def _summary(contents: Description, found: Findings) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = {
        "model": contents["name"] or "unnamed",
        "architecture": contents["architecture"] or "unknown",
        "runs": "yes" if found.runs else "no",
        "parameters": f"{_count(contents['parameters'])} ({contents['parameters']:,})",
        "weights": f"{show_bytes(contents['bytes'])}, {contents['bits_per_weight']:.2f} bits per parameter",
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), _text(value))
        if name == "runs":
            for label, text in (("why not", found.problem), ("hint", found.hint)):
                if text is not None:
                    table.add_row(Text(label, style="bold red"), Text(printable(text)))
            for note in found.notes:
                table.add_row(Text("note", style="bold"), Text(printable(note)))
    for file in contents["files"]:
        described = (
            f"{file['path']} ({show_bytes(file['bytes'])}, GGUF {file['version']}, {file['tensors']} tensors)"
        )
        table.add_row(Text("file", style="bold"), _text(described))
    return table


def _metadata_table(metadata: dict[str, Any]) -> Table:
    table = _table("Metadata")
    table.add_column("key", no_wrap=True)
    table.add_column("value")  # takes the width that the keys leave
    for key, value in metadata.items():
        table.add_row(_text(key), _text(_value(value)))
    return table


def _type_table(types: list[TypeRow]) -> Table:
    table = _table("Types")
    table.add_column("type")
    for name in ("tensors", "parameters", "bytes", "bits per parameter"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in types:
        table.add_row(
            _text(row["type"]),
            str(row["tensors"]),
            _count(row["parameters"]),
            show_bytes(row["bytes"]),
            f"{row['bits_per_weight']:.2f}",
            "" if row["is_supported"] else Text("not supported", style="red"),
        )
    return table


def _tensor_table(tensors: list[TensorRow]) -> Table:
    table = _table("Tensors")
    table.add_column("name", no_wrap=True)
    table.add_column("shape", justify="right")
    table.add_column("type")
    table.add_column("bytes", justify="right")
    for row in tensors:
        shape = " × ".join(str(axis) for axis in row["shape"])
        table.add_row(_text(row["name"]), shape, _text(row["type"]), show_bytes(row["bytes"]))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def _value(value: Any) -> str:
    """A value as one line; for a long array, its length and its first elements."""
    if isinstance(value, dict):
        return f"{value['count']:,} × {value['of']}: {_value(value['first'])[:-1]}, …]"
    if isinstance(value, float):
        return f"{value:.7g}"  # the precision of float32
    return value[:_VALUE_CHARS] if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _count(n: int) -> str:
    """A number of parameters as in model names: 260 K, 7.24 B."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return str(n)


def _text(string: str) -> Text:
    """Text from a file, made safe to print: no markup, no control characters."""
    return Text(printable(string), no_wrap=True, overflow="ellipsis")
