"""How errors are shown: one line and a hint. It imports no torch, so that a typing mistake is reported at once."""

from __future__ import annotations

import json
import re

import typer
from rich.console import Console
from rich.text import Text

from motley.errors import MotleyError

# The flags of options that errors name as Python does.
_FLAGS = {
    "temperature": "--temp",
    "typical_p": "--typical",
    "max_tokens": "-n",
    "stop": "-r",
    "n_keep": "--keep",
    "n_ctx": "-c",
    "n_threads": "-t",
    "n_batch": "-b",
    "n_parallel": "-np",
    "on_loss": "--on-loss",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            "top_k",
            "top_p",
            "min_p",
            "repeat_penalty",
            "repeat_last_n",
            "frequency_penalty",
            "presence_penalty",
            "logit_bias",
            "seed",
            "n_expert_used",
            "n_layer_exit",
            "draft_max",
            "draft_min",
            "draft_layers",
            "lookup_answers",
            "kv_cache_tokens",
            "kv_cache_bytes",
            "kv_block_size",
        )
    },
}
# What a flag takes besides the values that the hint about the option names.
_ALSO = {"max_tokens": ", or -1: no limit", "seed": ", or -1: a different one each time"}

# Exit codes.
USER_ERROR = 2
INTERRUPTED = 130  # as in a shell: 128 + SIGINT


def stderr() -> Console:
    """A console on the current sys.stderr; long lines are not wrapped."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str, *, style: str = "dim") -> None:
    """Prints one line to standard error."""
    stderr().print(Text("\n".join(map(printable, text.split("\n"))), style=style))


def report(error: MotleyError, *, as_json: bool = False) -> None:
    """Prints the error on one line of standard error, and its hint on the next. `as_json`: also as an object on
    standard output, for a program that reads it.
    """
    console = stderr()
    console.print(Text.assemble(("error: ", "bold red"), printable(error.message)))
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold cyan"), printable(error.hint)))
    if as_json:
        contents = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        typer.echo(json.dumps({"error": contents}, ensure_ascii=False))


def in_flags(error: MotleyError) -> MotleyError:
    """The error, about `-n` where it is about `max_tokens`."""
    name = re.match(r"(\w+)(=| is )", error.message)
    if name is None or name[1] not in _FLAGS:
        return error
    flag = _FLAGS[name[1]]
    message = f"{flag}{' ' if name[2] == '=' else name[2]}{error.message[name.end() :]}"
    hint = error.hint and re.sub(rf"^{name[1]}\b", flag, error.hint) + _ALSO.get(name[1], "")
    return type(error)(message, hint=hint) if type(error).__init__ is MotleyError.__init__ else error


def printable(text: str) -> str:
    """`text` with its control characters escaped, so that a terminal shows them and does not execute them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
