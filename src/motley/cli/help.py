"""The text of --help: no boxes, no name cut, at most 80 columns on a terminal of 80."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_NAMES_WIDTH = 28  # columns for a flag's names; longer names have a line of their own
_MAX_WIDTH = 100


def render_help(command: Any, ctx: Any) -> str:
    """The help of a command (or of the group of all commands), with colours if standard output is a terminal."""
    console = Console(highlight=False)
    console = Console(
        highlight=False,
        width=min(console.width, _MAX_WIDTH),
        force_terminal=sys.stdout.isatty(),
        file=sys.stdout,
    )
    with console.capture() as text:
        for part in _parts(command, ctx):
            console.print(part)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def _parts(command: Any, ctx: Any) -> Iterator[Any]:
    arguments = [p for p in command.get_params(ctx) if p.param_type_name == "argument"]
    listed = getattr(command, "commands", None)
    pieces = " ".join(name if p.required else f"[{name}]" for p in arguments for name in [_metavar(p)])
    usage = f"{ctx.command_path} [OPTIONS] {'COMMAND [ARGS]…' if listed else pieces}".rstrip()
    yield Text.assemble(("Usage: ", "bold"), usage)
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield Text()
        yield _paragraph(paragraph)
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in arguments:
        panels["Arguments"].append((_metavar(param), param.help or ""))
    for param in command.get_params(ctx):
        if param.param_type_name == "option" and not param.hidden:
            panel = getattr(param, "rich_help_panel", None) or "Options"
            panels.setdefault(panel, []).append((_names(param), _explanation(param)))
    if listed:
        panels["Commands"] = [(name, each.help or "") for name, each in listed.items()]
    for title, rows in ((title, rows) for title, rows in panels.items() if rows):
        yield Text()
        yield Text(f"{title}:", style="bold")
        yield from _rows(rows)


def _paragraph(text: str) -> Text:
    """A paragraph of a docstring. One that begins with \\b keeps its lines."""
    if text.startswith("\b"):
        lines = text.lstrip("\b\n").splitlines()
        return Text("\n").join(Text.from_markup(f"  {line}") for line in lines)
    return Text.from_markup(" ".join(text.split()))


def _rows(rows: Iterable[tuple[str, str]]) -> Iterator[Any]:
    for names, text in rows:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=_NAMES_WIDTH, no_wrap=True)
        table.add_column()
        if len(names) > _NAMES_WIDTH:
            yield Text(f"  {names}", style="cyan", no_wrap=True, overflow="ignore")
            names = ""
        table.add_row(Text(names, style="cyan"), Text(text))
        if names or text:
            yield Padding(table, (0, 0, 0, 2))


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _names(param: Any) -> str:
    """All names of an option, the shortest first, and the word for its value."""
    names = [*param.opts, *param.secondary_opts]
    value = "" if is_switch(param) else f" {param.metavar or _word(param)}"
    return ", ".join(sorted(names, key=lambda name: (name.startswith("--"), names.index(name)))) + value


def _word(param: Any) -> str:
    """The word for the value of an option that does not name one: `--port PORT`."""
    name: str = max(param.opts, key=len)
    return name.lstrip("-").rsplit("-", 1)[-1].upper()


def is_switch(param: Any) -> bool:
    """Whether no value follows this option."""
    return bool(getattr(param, "is_flag", False) or getattr(param, "count", False))


def _explanation(param: Any) -> str:
    text, default = param.help or "", param.default
    default = default.value if isinstance(default, Enum) else default
    if not param.show_default or default is None or default == () or callable(default) or "Default:" in text:
        return text
    if is_switch(param):
        return f"{text} Default: on." if default and param.secondary_opts else text
    return f"{text} Default: {default}."
