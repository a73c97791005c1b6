"""The `motley` command: its subcommands are listed here, and imported when they are chosen."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from motley import __version__
from motley.errors import ConfigError

# Where each command is, and the first line of its help.
COMMANDS = {
    "run": ("motley.cli.run:run", "Answer a prompt, or chat when there is none."),
    "perplexity": (
        "motley.cli.perplexity:perplexity",
        "Measure how well a model predicts a text: lower is better, 1 is perfect.",
    ),
    "tokenize": ("motley.cli.tokenize:tokenize", "Show the tokens of a text: one line each, id and piece."),
    "inspect": (
        "motley.cli.inspect:inspect",
        "Show what a model file holds: metadata, parameters, bytes by type, tensors.",
    ),
    "kv": (
        "motley.cli.kv:kv",
        "Show what the KV cache would be: blocks, bytes on each device, and what each type costs.",
    ),
    "bench": (
        "motley.cli.bench:bench",
        "Measure speed: prompt and decoding, at depths of context, by weight format and KV cache type.",
    ),
    "explain": (
        "motley.cli.explain:explain_command",
        "Show how a model would be split over devices, and why they would talk.",
    ),
    "kv-quality": (
        "motley.cli.kv_quality:kv_quality",
        "Measure what each KV cache type costs in quality and saves in memory.",
    ),
}
_SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _OnDemand(TyperGroup):
    """Torch takes seconds to import: a list of commands, a version or a typo need not wait for it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and load_command(str(listed.name)), rest


def load_command(name: str) -> Any:
    """The command itself."""
    module, _, function = COMMANDS[name][0].partition(":")
    gc.disable()  # the collector would walk through torch's 160,000 objects again and again while they come
    try:
        command = getattr(import_module(module), function)
    finally:
        gc.enable()
    alone = typer.Typer(add_completion=False, **_SETTINGS)
    alone.command(name)(command)
    return typer.main.get_command(alone)


app = typer.Typer(name="motley", cls=_OnDemand, no_args_is_help=True, **_SETTINGS)


def _listed() -> None:
    raise AssertionError("the command itself takes its place when it is chosen")


for _name, (_, _summary) in COMMANDS.items():
    app.command(_name, help=_summary)(_listed)


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
    _settle_streams()
    try:
        app(prog_name="motley")
    except OSError as error:  # standard output takes no more: its disk is full, for example
        from motley.cli.console import USER_ERROR, report  # the command has brought torch by now

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the rest of the output fails once more at the end
        where, hint = (
            (error.filename, None) if error.filename else ("standard output", "is there room on the disk?")
        )
        report(ConfigError(f"{where}: {error.strerror or error}", hint=hint))
        sys.exit(USER_ERROR)


def _settle_streams() -> None:
    """A stream that was closed is an empty one. What a terminal cannot show is spelled out, and bytes that are no text
    reach the tokenizer, which refuses them.
    """
    for name, mode, errors in (
        ("stdin", "r", "surrogateescape"),
        ("stdout", "w", "backslashreplace"),
        ("stderr", "w", "backslashreplace"),
    ):
        stream = getattr(sys, name) or open(os.devnull, mode)  # noqa: SIM115  it stays open
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
        setattr(sys, name, stream)
