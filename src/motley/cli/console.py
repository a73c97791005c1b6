"""The terminal: tables on standard output; progress, figures and errors on standard error."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
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

from motley.cli.report import INTERRUPTED, USER_ERROR, in_flags, printable, report, say, stderr
from motley.errors import DeviceError, MotleyError

_TOO_LITTLE = DeviceError(
    "this machine has too little memory for that", hint="try a smaller -c, batch or KV cache"
)
_PIPE_WIDTH = 160  # columns of a table if standard output is not a terminal


__all__ = [
    "INTERRUPTED",
    "USER_ERROR",
    "loading_bar",
    "printable",
    "report",
    "reporting_errors",
    "say",
    "stderr",
    "stdout",
    "steps_bar",
]


def stdout() -> Console:
    """A console for tables on the current sys.stdout."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


@contextmanager
def reporting_errors(debug: bool, *, as_json: bool = False) -> Iterator[None]:
    """Ends the command with two lines on standard error and exit code 2 on a MotleyError or MemoryError. `as_json`: the
    error is also an object on standard output.
    """
    try:
        yield
    except (MotleyError, MemoryError) as error:
        if debug:
            traceback.print_exc()
        report(in_flags(_TOO_LITTLE if isinstance(error, MemoryError) else error), as_json=as_json)
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
        is_announced = False

        def compiled(done: int, total: int) -> None:
            nonlocal is_announced
            if not is_announced and not console.is_terminal:
                say(f"compiling {total} kernels, first time on this GPU")
            is_announced = True
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
