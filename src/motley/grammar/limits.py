"""Limits on what a request may ask to be compiled. llguidance has its own for the size of what results.

A grammar of 20,000 rules that each refer to the next one overflows llguidance's stack and ends the process, so rules,
references and nesting are counted here first. Generated grammars of real schemas stay far below these numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from motley.errors import RequestError
from motley.grammar.lark import parts

MAX_BYTES = 256 * 1024  # of a schema, grammar or regex
MAX_RULES = 2000  # of a grammar
MAX_DEPTH = 64  # nested arrays, objects or parentheses
MAX_NODES = 20_000  # values in a schema
MAX_REFERENCES = 500  # "$ref" in a schema
MAX_COUNT = 100_000  # of a repetition, as in a{1000} or "maxItems": 1000
MAX_EXPANDED = 100_000  # characters of a regex when repetitions are written out: (a{1000}){100}

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_RULE = re.compile(
    r"^[ \t]*[?!]*[\w-]+[^\S\n]*(?:\[[^\]\n]*\][^\S\n]*)?(?:\.\d+[^\S\n]*)?(?:::=|:)", re.MULTILINE
)
_REPEAT = re.compile(r"\{[ \t]{0,9}(\d*)[ \t]{0,9}(?:(,)[ \t]{0,9}(\d*)[ \t]{0,9})?\}")


def check_size(name: str, text: str) -> None:
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode: {error.reason} at {error.start}") from None
    if n_bytes > MAX_BYTES:
        raise too_large(name, f"it has {n_bytes:,} bytes", f"{MAX_BYTES:,} bytes")


def check_schema(schema: Any) -> None:
    """Counts a JSON schema's values, references and depth, without recursion."""
    n_nodes = n_references = 0
    level = [schema]
    for _ in range(MAX_DEPTH + 1):
        n_nodes += len(level)
        if n_nodes > MAX_NODES:
            raise too_large("json_schema", f"it has more than {MAX_NODES:,} values", f"{MAX_NODES:,}")
        for value in level:
            if isinstance(value, dict):
                n_references += "$ref" in value
                _check_counts(value)
                if isinstance(pattern := value.get("pattern"), str):
                    check_regex("json_schema: pattern", pattern)
        if n_references > MAX_REFERENCES:
            raise too_large(
                "json_schema", f"it has more than {MAX_REFERENCES} references", f"{MAX_REFERENCES}"
            )
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise too_large("json_schema", f"it is nested more than {MAX_DEPTH} deep", f"a depth of {MAX_DEPTH}")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _check_counts(schema: dict[str, Any]) -> None:
    for key in _COUNTS:
        count = schema.get(key)
        if isinstance(count, int | float) and count > MAX_COUNT:
            raise too_large("json_schema", f"{key} is {str(count)[:20]}", f"{MAX_COUNT:,}")


def check_grammar(text: str) -> None:
    """Counts a grammar's rules, nesting and repetitions. Lark; also GBNF, as far as its strings look the same."""
    bare = []
    for kind, piece in parts(text):
        if kind == "regex":
            check_regex("grammar", piece.rstrip("abcdefghijklmnopqrstuvwxyz")[1:-1])
        bare.append('""' if kind else piece)
    rest = "".join(bare)
    if (n_rules := len(_RULE.findall(rest))) > MAX_RULES:
        raise too_large("grammar", f"it has {n_rules:,} rules", f"{MAX_RULES:,} rules")
    if (depth := _depth(rest)) > MAX_DEPTH:
        raise too_large("grammar", f"it is nested {depth:,} deep", f"a depth of {MAX_DEPTH}")
    for match in _REPEAT.finditer(rest):
        _check_repeat("grammar", match)


def check_regex(name: str, pattern: str) -> None:
    """Bounds what a regex is when its repetitions are written out: (a{1000}){1000} is a million characters."""
    sizes = [0]  # expanded size of each open group
    latest = 0  # of the latest atom
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "{" and (match := _REPEAT.match(pattern, at)):
            _check_repeat(name, match)
            times = max([int(n) for n in (match[1], match[3]) if n], default=1)
            sizes[-1] += latest * (times - 1) if times > 1 else 0
            at = match.end()
        elif char == "(":
            sizes.append(0)
            at += 1
        elif char == ")" and len(sizes) > 1:
            latest = sizes.pop()
            sizes[-1] += latest
            at += 1
        else:
            at = _after_atom(pattern, at)
            latest = 1
            sizes[-1] += 1
        if len(sizes) > MAX_DEPTH:
            raise too_large(name, f"it is nested more than {MAX_DEPTH} deep", f"a depth of {MAX_DEPTH}")
        if sizes[-1] > MAX_EXPANDED:
            raise too_large(name, "its repetitions multiply", f"{MAX_EXPANDED:,} characters written out")


def _after_atom(pattern: str, at: int) -> int:
    """The end of the character, escape or class that begins at `at`."""
    if pattern[at] == "\\":
        return at + 2
    if pattern[at] != "[":
        return at + 1
    at += 2 if pattern[at + 1 : at + 2] == "^" else 1
    at += pattern[at : at + 1] == "]"
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def _check_repeat(name: str, match: re.Match[str]) -> None:
    # A number of many digits is slow to convert, or refused by Python.
    if any(digits and (len(digits) > 9 or int(digits) > MAX_COUNT) for digits in (match[1], match[3])):
        raise too_large(name, f"it repeats {match[0][:40]}", f"{MAX_COUNT:,} repetitions")


def _depth(text: str) -> int:
    deepest = depth = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def too_large(name: str, why: str, limit: str) -> RequestError:
    return RequestError(f"{name} is too large: {why}", hint=f"the limit is {limit}")
