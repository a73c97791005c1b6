"""Integers of any library: numpy, torch and others have types of their own."""

from __future__ import annotations

import operator
from typing import Any


def as_int(value: Any) -> int | None:
    """The value as an int; None if it is not an integer. Bools and floats are none, 2.0 neither."""
    if type(value) is int:  # nearly always
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
