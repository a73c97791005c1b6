"""The terminal: tables on standard output; progress, figures and errors on standard error."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from motley.engine import Completion
from motley.engine.request import CANCELLED
from motley.errors import DeviceError, MotleyError
from motley.units import show_bytes

# Exit codes.
USER_ERROR = 2  # the same as for a flag that does not exist
INTERRUPTED = 130  # as in a shell: 128 + SIGINT

_PIPE_WIDTH = 160  # columns of a table if standard output is not a terminal


def stdout() -> Console:
    """A console for tables on the current sys.stdout."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def stderr() -> Console:
    """A console on the current sys.stderr; long lines are not wrapped."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str, *, style: str = "dim") -> None:
    """Prints one line to standard error."""
    stderr().print(Text(text, style=style))


def report(error: MotleyError) -> None:
    """Prints the error on one line, and its hint on the next."""
    console = stderr()
    console.print(Text.assemble(("error: ", "bold red"), error.message))
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold cyan"), error.hint))


@contextmanager
def reporting_errors(debug: bool) -> Iterator[None]:
    """Ends the command with two lines on standard error and exit code 2 on a MotleyError or MemoryError."""
    try:
        yield
    except MotleyError as error:
        if debug:
            traceback.print_exc()
        report(error)
        raise typer.Exit(USER_ERROR) from None
    except MemoryError:
        if debug:
            traceback.print_exc()
        report(
            DeviceError("this machine has too little memory for that", hint="a smaller -c, batch or KV cache")
        )
        raise typer.Exit(USER_ERROR) from None


@contextmanager
def loading_bar(title: str) -> Iterator[tuple[Callable[[int, int], None], Callable[[int, int], None]]]:
    """A progress bar over bytes, and then over kernels. It disappears when done, and is only shown on a terminal.

    Yields two functions to call with (done, total): one for bytes, one for compiled kernels.
    """
    console = stderr()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        compiling = f"{title}: compiling kernels, first time on this GPU"
        is_told = False

        def compiled(done: int, total: int) -> None:
            nonlocal is_told
            if not is_told and not console.is_terminal:
                say(f"compiling {total} kernels, first time on this GPU")
            is_told = True
            progress.update(task, completed=done, total=total, description=f"{compiling} ({done} of {total})")

        yield lambda done, total: progress.update(task, completed=done, total=total), compiled


@contextmanager
def steps_bar(title: str, n_steps: int) -> Iterator[Callable[[str], None]]:
    """A progress bar over steps. Yields a function to call after each step, with the text to show."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=n_steps)
        yield lambda so_far: progress.update(task, advance=1, description=f"{title}, {so_far}")


def printable(text: str) -> str:
    """`text` with its control characters escaped, so that a terminal shows them and does not execute them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_figures(completion: Completion, memory: Mapping[str, int]) -> None:
    """Prints speed and memory of one answer."""
    timings = completion.timings
    cached = f" ({timings.cached_tokens} cached)" if timings.cached_tokens else ""
    stopped = " (stopped)" if completion.finish_reason == CANCELLED else ""
    parts = ", ".join(f"{name.replace('_', ' ')} {show_bytes(n_bytes)}" for name, n_bytes in memory.items())
    say(
        f"prompt: {timings.prompt_tokens} tokens{cached}, {timings.prompt_rate:.1f} tokens/s | "
        f"answer: {timings.new_tokens} tokens{stopped}, {timings.new_rate:.1f} tokens/s | "
        f"memory: {show_bytes(sum(memory.values()))} ({parts})"
    )
