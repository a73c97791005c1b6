"""The `motley` command: its subcommands are listed here, and each is imported only when it is used."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from motley import __version__
from motley.cli import torchrun
from motley.cli.command import Command, Group
from motley.cli.report import USER_ERROR, report
from motley.errors import ConfigError
from motley.milestones import mark

# The module of each command, and the first line of its help.
COMMANDS = {
    "run": ("motley.cli.run:run", "Answer a prompt, or chat when there is none."),
    "serve": (
        "motley.cli.serve:serve",
        "Serve a model over HTTP: the APIs of OpenAI, Anthropic and llama-server.",
    ),
    "pull": (
        "motley.cli.pull:pull",
        "Download a model from Hugging Face, or continue a broken download.",
    ),
    "list": ("motley.cli.pull:list_models", "List the models that were downloaded."),
    "rm": (
        "motley.cli.pull:remove",
        "Delete a downloaded model: all its files, or those of one quantization.",
    ),
    "perplexity": (
        "motley.cli.perplexity:perplexity",
        "Measure how well a model predicts a text: lower is better, 1 is perfect.",
    ),
    "tokenize": ("motley.cli.tokenize:tokenize", "Show the tokens of a text: one line each, id and piece."),
    "inspect": (
        "motley.cli.inspect:inspect",
        "Show what a model file contains, and whether Motley runs it: metadata, bytes by type, tensors.",
    ),
    "kv": (
        "motley.cli.kv:kv",
        "Show the KV cache of a model before it is loaded: blocks, bytes on each device, and what each type costs.",
    ),
    "bench": (
        "motley.cli.bench:bench",
        "Measure the speed of prompts and of decoding, by context depth, weight format and KV cache type.",
    ),
    "devices": (
        "motley.cli.devices:devices",
        "Show the devices of this machine: name, memory, cores, instruction set.",
    ),
    "worker": (
        "motley.cli.worker:worker",
        "Lend this machine's devices to a Motley on this or another machine.",
    ),
    "doctor": (
        "motley.cli.doctor:doctor",
        "Check this installation: what is there, what is missing, and what to install.",
    ),
    "warm": (
        "motley.cli.warm:warm",
        "Compile a model's kernels for this machine's GPUs ahead of its first use.",
    ),
    "explain": (
        "motley.cli.explain:explain_command",
        "Show how a model would be split over devices, and why they would communicate.",
    ),
    "kv-quality": (
        "motley.cli.kv_quality:kv_quality",
        "Measure what each KV cache type costs in quality and saves in memory.",
    ),
    "effort-quality": (
        "motley.cli.effort_quality:effort_quality",
        "Measure what fewer experts or layers cost in quality and gain in speed.",
    ),
}
_SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _OnDemand(Group):
    """Loads commands on demand: torch takes seconds to import, and --help, --version or a typo do not need it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and load_command(str(listed.name)), rest


def load_command(name: str) -> Any:
    """The command with this name, imported."""
    module, _, function = COMMANDS[name][0].partition(":")
    gc.disable()  # it would scan torch's 160,000 objects repeatedly during the import
    mark("flags read")
    try:
        command = getattr(import_module(module), function)
    finally:
        gc.freeze()  # these objects stay: later collections need not scan them either
        gc.enable()
    mark("imports")
    alone = typer.Typer(add_completion=False, **_SETTINGS)
    alone.command(name, cls=Command)(command)
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


def run() -> int:
    """Runs the command line, and returns the exit code."""
    _settle_streams()
    if torchrun.is_worker():
        return torchrun.work()
    try:
        app(prog_name="motley")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except OSError as error:  # standard output cannot be written: for example, the disk is full
        code = _report_full(error)
    else:
        code = 0
    if torchrun.is_active():
        torchrun.finish()
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except OSError as error:
        code = _report_full(error)
    return code


def _report_full(error: OSError) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or flushing the rest fails again
    where, hint = (
        (error.filename, None) if error.filename else ("standard output", "is there room on the disk?")
    )
    report(ConfigError(f"{where}: {error.strerror or error}", hint=hint))
    return USER_ERROR


def _settle_streams() -> None:
    """Makes the standard streams usable: a closed one is replaced by an empty one, characters that the terminal cannot
    encode are escaped, and invalid UTF-8 is passed on to the tokenizer, which refuses it.
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
