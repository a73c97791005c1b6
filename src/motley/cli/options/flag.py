"""A flag as typer declares it."""

from __future__ import annotations

from typing import Any

import typer


def flag(*names: str, text: str, panel: str | None = None, **settings: Any) -> Any:
    """The declaration of a flag. `panel`: the heading in --help; None: Options."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)
