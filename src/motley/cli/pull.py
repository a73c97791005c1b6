"""`motley pull`, `motley list`, `motley rm`: models from a hub, in its cache folder."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from motley.cli.console import reporting_errors, say, stdout
from motley.cli.hub import Hub
from motley.cli.hub_names import parse_name
from motley.cli.inputs import fetch_from_hub
from motley.cli.options.model import HfFile, HfToken
from motley.cli.options.output import Debug, Json
from motley.units import show_bytes

Name = Annotated[str, typer.Argument(metavar="NAME", help="USER/REPO, or USER/REPO:QUANT.")]


def pull(
    name: Name,
    hf_file: HfFile = None,
    hf_token: HfToken = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Download a model from Hugging Face, or continue a broken download.

    The quantization is Q4_K_M, or the nearest one if the repository has no such file. The file goes to the usual cache
    folder (HF_HOME) and its checksum is compared. HF_TOKEN gives access to private models, HF_ENDPOINT names a mirror.

    \b
    [bold]motley pull bartowski/Llama-3.2-1B-Instruct-GGUF[/]
    [bold]motley pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0[/]
    """
    with reporting_errors(debug, as_json=as_json):
        path = fetch_from_hub(name, file=hf_file, token=hf_token)
    if as_json:
        typer.echo(json.dumps({"path": str(path)}))
    else:
        typer.echo(path)


def list_models(as_json: Json = False, debug: Debug = False) -> None:
    """List the models that were downloaded.

    \b
    [bold]motley list[/]
    [bold]motley run -hf NAME[/]   runs one of them
    """
    with reporting_errors(debug, as_json=as_json):
        stored = Hub(is_offline=True).stored()
    if as_json:
        rows = [{"name": str(m.name), "bytes": m.n_bytes, "files": [str(f) for f in m.files]} for m in stored]
        typer.echo(json.dumps(rows))
        return
    if not stored:
        say("There are no models yet: motley pull USER/REPO downloads one.")
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    table.add_column("size", justify="right")
    for model in stored:
        table.add_row(str(model.name), show_bytes(model.n_bytes))
    stdout().print(table)


def remove(name: Name, as_json: Json = False, debug: Debug = False) -> None:
    """Delete a downloaded model: all its files, or those of one quantization.

    \b
    [bold]motley rm USER/REPO:Q8_0[/]
    [bold]motley rm USER/REPO[/]
    """
    with reporting_errors(debug, as_json=as_json):
        freed = Hub(is_offline=True).remove(parse_name(name))
    if as_json:
        typer.echo(json.dumps({"freed": freed}))
    else:
        say(f"Deleted {name}: {show_bytes(freed)}.")
