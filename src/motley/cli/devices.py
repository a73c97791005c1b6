"""`motley devices`: the devices of this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from motley.cli.console import reporting_errors, stdout
from motley.cli.options.devices import SecretFile
from motley.cli.options.output import Debug, Json
from motley.runtime.hosts.calling import describe_host
from motley.runtime.hosts.protocol import read_secret
from motley.runtime.inventory import DeviceInfo, inventory
from motley.units import show_bytes

Host = Annotated[
    str | None,
    typer.Option("--host", help="Show the devices of a worker instead (motley worker).", metavar="ADDR:PORT"),
]


def devices(
    host: Host = None,
    secret_file: SecretFile = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the devices of this machine: name, memory, cores, instruction set.

    \b
    [bold]motley devices[/]
    [bold]motley run --device cuda:0,cpu model.gguf[/]   uses two of them
    """
    with reporting_errors(debug, as_json=as_json):
        found = inventory() if host is None else describe_host(host, read_secret(secret_file))
    if as_json:
        typer.echo(json.dumps([each.as_json() for each in found]))
        return
    table = Table(box=box.SIMPLE)
    for column in ("device", "name", "free", "memory", "cores", "instructions"):
        table.add_column(column)
    for each in found:
        table.add_row(*_cells(each))
    stdout().print(table)


def _cells(each: DeviceInfo) -> list[Any]:
    sizes = ["?" if n is None else show_bytes(n) for n in (each.free, each.total)]
    return [each.device, each.name, *sizes, str(each.cores), each.instructions]
