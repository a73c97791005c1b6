"""How many examples a property is tried with: all of them in CI and by `make test-all`, a third by `make test`."""

from __future__ import annotations

import os

_TRIES_ALL = bool(os.environ.get("CI") or os.environ.get("MOTLEY_ALL_TESTS"))


def examples(n: int) -> int:
    return n if _TRIES_ALL else n // 3
