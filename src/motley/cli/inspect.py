"""`motley inspect`: what a model file holds."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from motley.cli import options
from motley.cli.console import reporting_errors
from motley.cli.inputs import resolve_model
from motley.gguf import read_spec
from motley.gguf.inspect import describe

Tensors = Annotated[bool, typer.Option("--tensors", help="List every tensor.")]


def inspect(
    model: options.Model = None,
    model_flag: options.ModelFlag = None,
    tensors: Tensors = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what a model file holds: metadata, parameters, bytes by type, tensors.

    Nothing is loaded, but everything is checked.

    \b
    [bold]motley inspect model.gguf --tensors[/]
    [bold]motley inspect model.gguf --json | jq .architecture[/]
    """
    with reporting_errors(debug):
        contents = describe(read_spec(resolve_model(model, model_flag)))
    typer.echo(json.dumps(contents))
