"""Operations that cost out of proportion to what goes into them. Each pays in advance, or has a limit."""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from jinja2 import Undefined, filters
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from motley.errors import TemplateError
from motley.text.marked import join
from motley.text.meter import CONTAINERS, MAX_INT_BITS, Meter, check_limit

T = TypeVar("T")

MAX_INDENT = 100
MAX_SET = 100  # characters to strip: each is looked for at every place
MAX_BACKWARDS = 100  # searching backwards takes time in proportion to text times separator
MAX_DATE = 100
MAX_ATTRIBUTE = 200  # characters of a path such as "function.name", which each item is looked up by
STEP_BYTES = 256  # of a value that one step may compare or search
OBJECT_BYTES = 64  # a short string and the place in a list that holds it
REPR_GROWTH = 10  # one character can be written as "\U0010ffff"


class Costly:
    """The operations of one rendering, on its meter. Named as Python or Jinja names them."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def text(self, value: object) -> str:
        """A value as text, as Jinja shows it."""
        if isinstance(value, str):
            return value
        if isinstance(value, CONTAINERS):
            self._meter.spend(REPR_GROWTH * self._meter.weigh(value))
        elif not isinstance(value, (int, float, range, Undefined, type(None))):
            raise TemplateError(f"the chat template shows a {type(value).__name__} as text")
        return str(value)

    def join(self, separator: str, values: Iterable[object]) -> str:
        texts = []
        for value in values:
            self._meter.tick()
            texts.append(self.text(value))
            self._meter.spend(sys.getsizeof(texts[-1]) + len(separator))
        return join(separator, texts)

    def each(self, values: Iterable[T]) -> Iterator[T]:
        """The items, with a step for each, for filters that loop inside of Jinja."""
        for value in values:
            self._meter.tick()
            yield value

    def getter(self, environment: ImmutableSandboxedEnvironment, attribute: object) -> Callable[[Any], Any]:
        """A function from an item to its `attribute`, a path with dots; each part of the path is a step."""
        return filters.make_attrgetter(environment, self.attribute(attribute))

    def attribute(self, path: Any) -> Any:
        """A path that `filters.make_attrgetter` may take apart."""
        check_limit(len(path) if isinstance(path, str) else 0, MAX_ATTRIBUTE, "characters of an attribute")
        return path

    def sort(
        self,
        environment: ImmutableSandboxedEnvironment,
        values: Iterable[T],
        reverse: bool = False,
        case_sensitive: bool = False,
        attribute: object = None,
    ) -> list[T]:
        """Sorted by attributes (separated by commas). The keys, which are new lists and texts, are paid for."""
        fold = None if case_sensitive else filters.ignore_case
        keys_of = filters.make_multi_attrgetter(environment, self.attribute(attribute), postprocess=fold)

        def paid_key(value: T) -> list[Any]:
            keys = keys_of(value)
            n_bytes = sum(sys.getsizeof(key) for key in keys if isinstance(key, str))
            self._meter.spend(sys.getsizeof(keys) + n_bytes + OBJECT_BYTES)
            return keys

        return sorted(self.each(values), key=paid_key, reverse=reverse)

    def test(self, compare: Callable[..., Any]) -> Callable[[Any, Any], bool]:
        """A test of two values, such as `in` or `==`, which pays for the larger of them."""

        def paid_test(value: Any, other: Any) -> bool:
            sizes = [self._meter.weigh(x) for x in (value, other) if isinstance(x, (str, *CONTAINERS))]
            self._meter.tick(1 + max(sizes, default=0) // STEP_BYTES)
            return bool(compare(value, other))

        return paid_test

    def replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        n_found = text.count(old) if count < 0 else min(count, text.count(old))
        self._meter.spend(len(text) + n_found * len(new))
        return text.replace(old, new, count)

    def split(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        self._pay_for_parts(text, sep, maxsplit)
        return text.split(sep, maxsplit)

    def rsplit(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        check_limit(len(sep or ""), MAX_BACKWARDS, "characters to look for backwards")
        self._pay_for_parts(text, sep, maxsplit)
        return text.rsplit(sep, maxsplit)

    def splitlines(self, text: str, keepends: bool = False) -> list[str]:
        self._pay_for_parts(text)
        return text.splitlines(keepends)

    def strip(self, text: str, chars: str | None = None) -> str:
        return text.strip(_checked_set(chars))

    def lstrip(self, text: str, chars: str | None = None) -> str:
        return text.lstrip(_checked_set(chars))

    def rstrip(self, text: str, chars: str | None = None) -> str:
        return text.rstrip(_checked_set(chars))

    def title(self, text: str) -> str:
        self._pay_for_parts(text)
        return filters.do_title(text)

    def indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        n_columns = len(width) if isinstance(width, str) else width
        check_limit(n_columns, MAX_INDENT, "columns of indentation")
        self._pay_for_parts(text)
        self._meter.spend((1 + len(text.splitlines())) * n_columns)
        return filters.do_indent(text, width, first, blank)

    def tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as chat templates expect it: for a model to read, so neither ASCII nor safe for HTML."""
        check_limit(indent or 0, MAX_INDENT, "columns of indentation")
        plain = list(value) if isinstance(value, Iterator) else value
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        pieces = []
        for piece in encoder.iterencode(plain):
            self._meter.spend(len(piece) + OBJECT_BYTES)
            pieces.append(piece)
        return "".join(pieces)

    def mapping(self, pairs: object = (), **entries: object) -> dict[object, object]:
        """One entry at a time, because keys can be chosen that collide."""
        made: dict[object, object] = {}
        for key, value in pairs.items() if isinstance(pairs, dict) else pairs:  # type: ignore[attr-defined]
            self._meter.tick()
            made[key] = value
        return made | entries

    def multiply(self, left: object, right: object) -> object:
        for factor, times in ((left, right), (right, left)):
            if isinstance(factor, (str, list, tuple)) and isinstance(times, int):
                n_bytes = sys.getsizeof(factor) - sys.getsizeof(factor[:0])
                self._meter.spend(n_bytes * max(times, 0))
        if isinstance(left, int) and isinstance(right, int):
            check_limit(left.bit_length() + right.bit_length(), MAX_INT_BITS, "bits in a number")
        return left * right  # type: ignore[operator]  # what cannot be multiplied says so

    def power(self, base: object, exponent: object) -> object:
        if isinstance(base, int) and isinstance(exponent, int):
            check_limit(base.bit_length() * exponent, MAX_INT_BITS, "bits in a number")
        return base**exponent  # type: ignore[operator]  # as above

    def remainder(self, left: object, right: object) -> object:
        """`%`: of numbers, or the formatting of text, without fields by name and widths from values."""
        if isinstance(left, str):
            if re.search(r"%\(|%[-+ #0-9.]*(?:[0-9]{4}|\*)", left):
                raise TemplateError(f"the chat template formats in a way it may not: {left!r:.60}")
            self._pay_for_fields(left.count("%"), right)
        return left % right  # type: ignore[operator]  # as above

    def format(
        self,
        environment: ImmutableSandboxedEnvironment,
        text: str,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> str:
        """`str.format`, without widths from values and with the environment's idea of attributes."""
        specs = [spec or "" for _, name, spec, _ in string.Formatter().parse(text) if name is not None]
        if any(re.search(r"[0-9]{4}|[{}]", spec) for spec in specs):
            raise TemplateError(f"the chat template formats in a way it may not: {text!r:.60}")
        self._pay_for_fields(len(specs), [*args, *kwargs.values()])
        return SandboxedFormatter(environment).vformat(text, args, kwargs)

    def strftime(self, now: datetime, pattern: str) -> str:
        check_limit(len(pattern), MAX_DATE, "characters of a date")
        return now.strftime(pattern)

    def _pay_for_fields(self, n_fields: int, values: object) -> None:
        self._meter.spend((n_fields + 1) * REPR_GROWTH * self._meter.weigh(values))

    def _pay_for_parts(self, text: str, separator: str | None = None, maxsplit: int = -1) -> None:
        n_parts = len(text) // 2 if separator is None else text.count(separator)
        self._meter.spend(len(text) + OBJECT_BYTES * (n_parts if maxsplit < 0 else min(n_parts, maxsplit)))


def _checked_set(chars: str | None) -> str | None:
    check_limit(len(chars or ""), MAX_SET, "characters to strip")
    return chars
