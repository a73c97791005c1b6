"""How much is tried: all of it in CI and by `make test-all`, a part by `make test`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

TRIES_ALL = bool(os.environ.get("CI") or os.environ.get("MOTLEY_ALL_TESTS"))


def examples(n: int) -> int:
    """Of a property: a third by `make test`."""
    return n if TRIES_ALL else n // 3


def first(n: int, values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, of which `make test` tries the first `n`: the others are slow."""
    return [value if i < n else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]
