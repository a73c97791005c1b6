"""Operations whose result can be far larger than what goes in. Each pays for its result in advance."""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jinja2 import Undefined, filters
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from motley.errors import TemplateError
from motley.text.meter import CONTAINERS, Meter

MAX_INT_BITS = 4096
MAX_INDENT = 100
OBJECT_BYTES = 64  # a short string and the place in a list that holds it
REPR_GROWTH = 10  # one character can be written as "\U0010ffff"


class Growth:
    """The growing operations of one rendering, on its meter."""

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
            texts.append(self.text(value))
            self._meter.spend(sys.getsizeof(texts[-1]) + len(separator))
        return separator.join(texts)

    def replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        n_found = text.count(old) if count < 0 else min(count, text.count(old))
        self._meter.spend(len(text) + n_found * len(new))
        return text.replace(old, new, count)

    def split(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        self._pay_for_parts(text, sep, maxsplit)
        return text.split(sep, maxsplit)

    def rsplit(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        self._pay_for_parts(text, sep, maxsplit)
        return text.rsplit(sep, maxsplit)

    def splitlines(self, text: str, keepends: bool = False) -> list[str]:
        self._pay_for_parts(text, None, -1)
        return text.splitlines(keepends)

    def title(self, text: str) -> str:
        self._pay_for_parts(text, None, -1)
        return filters.do_title(text)

    def indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        n_margin = len(width) if isinstance(width, str) else width
        _check_indent(n_margin)
        self._pay_for_parts(text, None, -1)
        self._meter.spend((1 + len(text.splitlines())) * n_margin)
        return filters.do_indent(text, width, first, blank)

    def to_json(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as chat templates expect it: for a model to read, so neither ASCII nor HTML-safe."""
        _check_indent(indent or 0)
        plain = list(value) if isinstance(value, Iterator) else value
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        pieces = []
        for piece in encoder.iterencode(plain):
            self._meter.spend(len(piece) + OBJECT_BYTES)
            pieces.append(piece)
        return "".join(pieces)

    def multiply(self, left: object, right: object) -> object:
        for factor, times in ((left, right), (right, left)):
            if isinstance(factor, (str, list, tuple)) and isinstance(times, int):
                self._meter.spend((sys.getsizeof(factor) - sys.getsizeof(factor[:0])) * max(times, 0))
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        return left * right  # type: ignore[operator]  # what cannot be multiplied says so

    def power(self, base: object, exponent: object) -> object:
        if isinstance(base, int) and isinstance(exponent, int):
            _check_bits(base.bit_length() * max(exponent, 0))
        return base**exponent  # type: ignore[operator]  # as above

    def remainder(self, left: object, right: object) -> object:
        """`%`: of numbers, or the formatting of text."""
        if isinstance(left, str):
            _check_width(left, is_percent=True)
            self._pay_for_fields(left.count("%"), right)
        return left % right  # type: ignore[operator]  # as above

    def format(
        self,
        environment: ImmutableSandboxedEnvironment,
        text: str,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> str:
        """`str.format` without widths that nobody needs and without a way to attributes."""
        fields = [spec or "" for _, name, spec, _ in string.Formatter().parse(text) if name is not None]
        for spec in fields:
            _check_width(spec, is_percent=False)
        self._pay_for_fields(len(fields), [*args, *kwargs.values()])
        return SandboxedFormatter(environment).vformat(text, args, kwargs)

    def _pay_for_fields(self, n_fields: int, values: object) -> None:
        self._meter.spend((n_fields + 1) * REPR_GROWTH * self._meter.weigh(values))

    def _pay_for_parts(self, text: str, separator: str | None, maxsplit: int) -> None:
        n_parts = len(text) // 2 if separator is None else text.count(separator)
        self._meter.spend(len(text) + OBJECT_BYTES * (n_parts if maxsplit < 0 else min(n_parts, maxsplit)))


def _check_indent(n_columns: int) -> None:
    if n_columns > MAX_INDENT:
        raise TemplateError(f"the chat template indents by more than {MAX_INDENT} columns")


def _check_bits(n_bits: int) -> None:
    if n_bits > MAX_INT_BITS:
        raise TemplateError(f"the chat template computes a number of more than {MAX_INT_BITS} bits")


def _check_width(spec: str, *, is_percent: bool) -> None:
    """Widths and precisions of up to three digits, and none that come from a value."""
    pattern = r"%[-+ #0-9.]*([0-9]{4}|\*)|%\([^)]*\)[-+ #0-9.]*[0-9]{4}" if is_percent else r"[0-9]{4}|[{}]"
    if re.search(pattern, spec):
        raise TemplateError(f"the chat template asks for an absurd width in {spec!r:.60}")
