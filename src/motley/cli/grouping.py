"""Flags that several commands share, as dataclasses: a command takes one parameter for the whole group."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces parameters whose type is a dataclass of flags by its fields, in the signature that typer sees. Before
    the command is called, the dataclasses are built from the fields.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters, groups = [], {}
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            flags = get_type_hints(hints[name], include_extras=True)
            for field in fields(hints[name]):
                parameters.append(
                    parameter.replace(name=field.name, default=field.default, annotation=flags[field.name])
                )
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @wraps(command)
    def spread(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    spread.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread
