"""The limits of one rendering of a chat template, and its costs so far."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from jinja2.runtime import LoopContext, Undefined

from motley.errors import TemplateError

T = TypeVar("T")

SCALARS = (str, int, float, type(None), Undefined, range)
CONTAINERS = (dict, list, tuple, KeysView, ValuesView, ItemsView)
MAX_INT_BITS = 4096
MAX_DEPTH = 100  # of containers in containers; Python itself may crash on the hash of a very deep tuple


@dataclass(frozen=True)
class TemplateLimits:
    """Far above what chat templates need (milliseconds, thousands of steps), far below what hurts."""

    steps: int = 5_000_000  # rounds of loops, calls, filters, comparisons, pieces of output
    value_bytes: int = 16 << 20  # one value, with its parts counted every time they occur in it
    total_bytes: int = 256 << 20  # all values ever made
    seconds: float = 5.0


class Meter:
    """Counts for one rendering. Any excess is a TemplateError, and stays one."""

    def __init__(self, limits: TemplateLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._deadline = clock() + limits.seconds
        self._n_steps = 0
        self._n_bytes = 0
        # (weight, depth) of containers by id, with the container so that the id stays its own. Nothing in a
        # template changes a container, so they hold; and shared parts are not walked again and again.
        self._measures: dict[int, tuple[int, int, object]] = {}

    def tick(self, n: int = 1) -> bool:
        """Count one step, or the `n` that an operation is worth. True, so that it can be part of a condition."""
        self._n_steps += n
        if self._n_steps > self._limits.steps:
            raise _excess(f"runs for more than {self._limits.steps} steps")
        if self._clock() > self._deadline:
            raise _excess(f"runs for more than {self._limits.seconds:g} seconds")
        return True

    def spend(self, n_bytes: int) -> None:
        """Memory that is about to be used, or just has been."""
        self._n_bytes += n_bytes
        if self._n_bytes > self._limits.total_bytes:
            raise _excess(f"makes more than {self._limits.total_bytes} bytes of values")

    def admit(self, value: T) -> T:
        """Every value that a template makes comes through here; an iterator is admitted item by item."""
        self.tick()
        if isinstance(value, Iterator) and not isinstance(value, LoopContext):
            return self._flow(value)  # type: ignore[return-value]  # still an iterator over the same items
        self.spend(sys.getsizeof(value))
        if isinstance(value, int):
            check_limit(value.bit_length(), MAX_INT_BITS, "bits in a number")
        if isinstance(value, SCALARS + CONTAINERS):
            self.weigh(value)
        return value

    def weigh(self, value: object) -> int:
        """Bytes of a value; shared parts count each time, because printing or comparing it visits them each time."""
        return self._measure(value)[0]

    def _measure(self, value: object) -> tuple[int, int]:
        """Weight and depth, in a walk that ends as soon as the value turns out too heavy."""
        if known := self._measures.get(id(value)):
            return known[:2]
        weight, depth = sys.getsizeof(value), 0
        self._check_weight(weight)
        if isinstance(value, SCALARS):
            return weight, depth
        if not isinstance(value, CONTAINERS):
            raise TemplateError(f"the chat template uses a {type(value).__name__} as if it were data")
        parts: Iterable[object] = chain(value.keys(), value.values()) if isinstance(value, dict) else value
        for part in parts:
            part_weight, part_depth = self._measure(part)
            weight, depth = weight + part_weight, max(depth, part_depth)
            self._check_weight(weight)
        check_limit(depth + 1, MAX_DEPTH, "containers in one another")
        self._measures[id(value)] = weight, depth + 1, value
        return weight, depth + 1

    def _check_weight(self, n_bytes: int) -> None:
        if n_bytes > self._limits.value_bytes:
            raise _excess(f"makes a value of more than {self._limits.value_bytes} bytes")

    def _flow(self, items: Iterator[object]) -> Iterator[object]:
        for item in items:
            yield self.admit(item)


def check_limit(n: int, limit: int, what: str) -> None:
    """Raises a TemplateError for a single operation beyond a limit that no honest template exceeds."""
    if n > limit:
        raise TemplateError(f"the chat template exceeds a limit: more than {limit} {what}")


def _excess(what: str) -> TemplateError:
    return TemplateError(f"the chat template {what}", hint="use another template; this one looks hostile")
