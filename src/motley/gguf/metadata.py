"""Metadata of a model file, with typed access that names the file and the key when something is wrong."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from motley.errors import GGUFError

# Arrays of numbers and booleans are read-only views of the file; those of strings or arrays are tuples.
Value = bool | int | float | str | NDArray[Any] | tuple["Value", ...]

_T = TypeVar("_T")
_D = TypeVar("_D")


class Required(Enum):
    """The type of `REQUIRED`, the default of keys that have none."""

    REQUIRED = "required"


REQUIRED: Final = Required.REQUIRED


class _MissingKeyError(GGUFError, KeyError):
    """A `KeyError` too, because `Mapping` builds `get` and `in` on that."""


class Metadata(Mapping[str, Value]):
    """Read-only. `metadata[key]` is what is stored; typed methods check it. Defaults replace absent keys."""

    def __init__(self, values: Mapping[str, Value], path: Path) -> None:
        self._values = dict(values)
        self.path = path

    def __getitem__(self, key: builtins.str) -> Value:
        try:
            return self._values[key]
        except KeyError:
            raise _MissingKeyError(f"{self.path}: the metadata key {key} is missing") from None

    def __iter__(self) -> Iterator[builtins.str]:
        return iter(self._values)

    def __len__(self) -> builtins.int:
        return len(self._values)

    def int(self, key: builtins.str, default: _D | Required = REQUIRED) -> builtins.int | _D:
        return self._typed(key, _as_int, "an integer", default)

    def float(self, key: builtins.str, default: _D | Required = REQUIRED) -> builtins.float | _D:
        return self._typed(key, _as_float, "a number", default)

    def bool(self, key: builtins.str, default: _D | Required = REQUIRED) -> builtins.bool | _D:
        return self._typed(key, _as_bool, "a boolean", default)

    def str(self, key: builtins.str, default: _D | Required = REQUIRED) -> builtins.str | _D:
        return self._typed(key, _as_str, "a string", default)

    def ints(self, key: builtins.str, default: _D | Required = REQUIRED) -> list[builtins.int] | _D:
        return self._typed(key, _as_ints, "an array of integers", default)

    def floats(self, key: builtins.str, default: _D | Required = REQUIRED) -> list[builtins.float] | _D:
        return self._typed(key, _as_floats, "an array of numbers", default)

    def bools(self, key: builtins.str, default: _D | Required = REQUIRED) -> list[builtins.bool] | _D:
        return self._typed(key, _as_bools, "an array of booleans", default)

    def strs(self, key: builtins.str, default: _D | Required = REQUIRED) -> list[builtins.str] | _D:
        return self._typed(key, _as_strs, "an array of strings", default)

    def _typed(
        self,
        key: builtins.str,
        convert: Callable[[Value], _T | None],
        expected: builtins.str,
        default: _D | Required,
    ) -> _T | _D:
        if key not in self._values and not isinstance(default, Required):
            return default
        stored = self[key]
        value = convert(stored)
        if value is None:
            raise GGUFError(
                f"{self.path}: the metadata key {key} should be {expected}, but it is {kind_of(stored)}"
            )
        return value


# A stored value as a type, or None if it is of another. Integers count as floats; booleans are no integers.


def _as_int(value: Value) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_float(value: Value) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _as_bool(value: Value) -> bool | None:
    return value if isinstance(value, bool) else None


def _as_str(value: Value) -> str | None:
    return value if isinstance(value, str) else None


def _as_ints(value: Value) -> list[int] | None:
    return list(value.tolist()) if isinstance(value, np.ndarray) and value.dtype.kind in "iu" else None


def _as_floats(value: Value) -> list[float] | None:
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "iuf"
    return list(np.asarray(value, np.float64).tolist()) if is_numeric else None


def _as_bools(value: Value) -> list[bool] | None:
    return list(value.tolist()) if isinstance(value, np.ndarray) and value.dtype.kind == "b" else None


def _as_strs(value: Value) -> list[str] | None:
    if not isinstance(value, tuple):
        return None
    texts = [text for text in value if isinstance(text, str)]
    return texts if len(texts) == len(value) else None


def kind_of(value: Value) -> str:
    """The type of a value, in words."""
    match value:
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a float"
        case str():
            return "a string"
        case _:
            return f"an array of {item_kind(value)}"


def item_kind(array: NDArray[Any] | tuple[Value, ...]) -> str:
    """The kind of an array's items."""
    if isinstance(array, np.ndarray):
        return str(array.dtype.name)
    return "arrays" if _as_strs(array) is None else "strings"
