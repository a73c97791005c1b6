"""The lookup drafter's index in the native core. `motley.engine.drafting.lookup.TextIndex` is the specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from motley.backends.cpu.native import HAS_LOOKUP, core


def new_text_index(prompt: Sequence[int]) -> Any | None:
    """An index of a text that begins with `prompt`, for `look_up`; None: the core has none.

    It has room for the prompt, and no token of it is indexed: `look_up` indexes a portion in each call, `index(n_max)`
    more, without Python's lock.
    """
    return core.TextIndex(prompt) if HAS_LOOKUP else None


def look_up(
    indexes: Sequence[Any], answers: Sequence[list[int]], n_max: int
) -> list[tuple[int, Sequence[int], int]]:
    """The likely continuation of each text that has one: (row, up to `n_max` tokens, length of the match).

    `answers`: what follows the prompts so far; their new tokens are added to the indexes.
    """
    found: list[tuple[int, Sequence[int], int]] = core.look_up(indexes, answers, n_max)
    return found
