"""The flags for what a command prints."""

from __future__ import annotations

from typing import Annotated

from motley.cli.options.flag import flag

_PANEL = "Output"  # of --help

DisplayPrompt = Annotated[
    bool | None,
    flag(
        "--display-prompt/--no-display-prompt",
        text="Print a text before its continuation. Default: on a terminal.",
        panel=_PANEL,
    ),
]
Markdown = Annotated[
    bool, flag("--markdown", text="Render Markdown in answers, on a terminal.", panel=_PANEL)
]
Json = Annotated[
    bool,
    flag(
        "--json",
        text="Print one JSON object to standard output, also for an error.",
        panel=_PANEL,
    ),
]
Debug = Annotated[bool, flag("--debug", text="Show where an error comes from.", panel=_PANEL)]
