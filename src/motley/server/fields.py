"""Typed access to the JSON of a request. null means absent everywhere, as clients send it for what they do not set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from motley.server.errors import ApiError, invalid

_SHOWN = 60  # characters of a value in an error


class Fields:
    """A JSON object. Unknown fields are ignored; a field of a wrong type is a 400 that names it."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def raw(self, *names: str) -> Any:
        """The first of these fields that is there; None without one."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def integer(self, name: str, default: int | None = None) -> int | None:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():  # JavaScript has no integers
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, value, "a number")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def items(self, name: str) -> list[Any] | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return value

    def wrong(self, name: str, value: Any, expected: str) -> ApiError:
        return invalid(f"{self._where}{name} must be {expected}, not {show(value)}", param=name)


def show(value: Any) -> str:
    """A value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
