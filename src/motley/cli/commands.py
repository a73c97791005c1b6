"""The `motley` command: one function per subcommand, registered here."""

from __future__ import annotations

from typing import Annotated

import typer

from motley import __version__
from motley.cli.bench import bench
from motley.cli.explain import explain_command
from motley.cli.inspect import inspect
from motley.cli.kv import kv
from motley.cli.kv_quality import kv_quality
from motley.cli.perplexity import perplexity
from motley.cli.run import run
from motley.cli.tokenize import tokenize

app = typer.Typer(
    name="motley",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, perplexity, tokenize, inspect, kv, bench):
    app.command()(command)
app.command("explain")(explain_command)
app.command("kv-quality")(kv_quality)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"motley {__version__}")
        raise typer.Exit


@app.callback()
def motley(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run large language models from GGUF files.

    [bold]motley run[/] alone talks to the small model that comes with Motley,
    [bold]motley run MODEL[/] to yours. Every command has its own [bold]--help[/].
    """


def main() -> None:
    app(prog_name="motley")
