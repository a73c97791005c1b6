"""Calls in syntaxes of their own, which are read when they are whole: Gemma's mappings, Python's calls."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from motley.text.tools.format import ToolFormat
from motley.text.tools.readers import Context, Reader, Status

QUOTE = '<|"|>'
_GEMMA_NAME = re.compile(r"\s*([\w.\-/$]{1,256})\s*(?=\{)")
_GEMMA_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_GEMMA_SCALAR = re.compile(r"\s*(-?[0-9.]+(?:[eE][-+]?[0-9]+)?|true|false|null|None)")
MAX_DEPTH = 50


class GemmaReader(Reader):
    """name{key:<|"|>text<|"|>,other:2}"""

    def __init__(self, context: Context, form: ToolFormat) -> None:
        super().__init__(context)
        self._end = form.call_end.strip()

    def read(self, text: str, final: bool) -> tuple[int, Status]:
        at = text.find(self._end)
        if at < 0 and not final:
            return 0, Status.MORE
        body = text if at < 0 else text[:at]
        found = _GEMMA_NAME.match(body)
        try:
            if found is None:
                return 0, Status.FAILED
            value, end = _gemma_value(body, found.end(), 0)
        except _NoValue:
            return 0, Status.FAILED
        if body[end:].strip() or not isinstance(value, dict):
            return 0, Status.FAILED
        self.index = self.context.start(found[1])
        self.arguments(json.dumps(value, ensure_ascii=False))
        return len(body), Status.DONE


class _NoValue(Exception):  # noqa: N818
    pass


def _gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    while at < len(text) and text[at].isspace():
        at += 1
    if depth > MAX_DEPTH:
        raise _NoValue
    for quote in (QUOTE, '"'):
        if text.startswith(quote, at):
            end = text.find(quote, at + len(quote))
            if end < 0:
                raise _NoValue
            return text[at + len(quote) : end], end + len(quote)
    if text.startswith("{", at):
        return _gemma_items(text, at + 1, "}", depth)
    if text.startswith("[", at):
        return _gemma_items(text, at + 1, "]", depth)
    found = _GEMMA_SCALAR.match(text, at)
    if found is None:
        raise _NoValue
    try:
        return json.loads("null" if found[1] == "None" else found[1]), found.end()
    except ValueError:
        raise _NoValue from None


def _gemma_items(text: str, at: int, close: str, depth: int) -> tuple[Any, int]:
    mapping: dict[str, Any] = {}
    items: list[Any] = []
    while True:
        while at < len(text) and (text[at].isspace() or text[at] == ","):
            at += 1
        if text.startswith(close, at):
            return (mapping if close == "}" else items), at + 1
        if close == "}":
            if text.startswith(QUOTE, at):
                key, at = _gemma_value(text, at, depth + 1)
                if not text.startswith(":", at):
                    raise _NoValue
                at += 1
            else:
                found = _GEMMA_KEY.match(text, at)
                if found is None:
                    raise _NoValue
                key, at = found[1].strip('"'), found.end()
            mapping[str(key)], at = _gemma_value(text, at, depth + 1)
        else:
            item, at = _gemma_value(text, at, depth + 1)
            items.append(item)


def gemma_text(value: Any) -> str:
    """A value in Gemma's syntax."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_text, value)) + "]"
    return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value)


class PythonReader(Reader):
    """A section of calls: [f(a='x', b=2), g()]. Reads from behind the section's first tag to its last."""

    def __init__(self, context: Context, form: ToolFormat) -> None:
        super().__init__(context)
        self._end = form.section_end.strip().removeprefix("]")

    def read(self, text: str, final: bool) -> tuple[int, Status]:
        at = text.find(self._end)
        if at < 0 and not final:
            return 0, Status.MORE
        body = text if at < 0 else text[:at]
        calls = self._calls(body.strip())
        if not calls:
            return 0, Status.FAILED
        for name, arguments in calls:
            self.index = self.context.start(name)
            self.arguments(arguments)
        return len(text) if at < 0 else at + len(self._end), Status.DONE

    def _calls(self, text: str) -> list[tuple[str, str]]:
        """Names such as "get-weather" are not valid in Python: placeholders replace them while the text is read."""
        odd = [name for name in self.context.tools if not name.isidentifier()]
        for i, name in enumerate(odd):
            text = text.replace(f"{name}(", f"odd_name_{i}_(")
        names = {f"odd_name_{i}_": name for i, name in enumerate(odd)}
        return [(names.get(name, name), arguments) for name, arguments in _python_calls(text)]


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Names and arguments as JSON; none where the text is no list of calls."""
    if len(text) > 100_000:
        return []
    try:
        tree = ast.parse(text if text.startswith("[") else f"[{text}]", mode="eval").body
        calls = []
        for call in tree.elts if isinstance(tree, ast.List) else ():
            if not isinstance(call, ast.Call) or call.args:
                return []
            name = ast.unparse(call.func)
            values = {}
            for keyword in call.keywords:
                if keyword.arg is None:
                    return []
                values[keyword.arg] = _python_value(keyword.value)
            calls.append((name, json.dumps(values, ensure_ascii=False, allow_nan=False)))
            calls[-1][1].encode()
        return calls
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []


def _python_value(node: ast.expr) -> Any:
    """A literal, in which JSON's words may replace Python's."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return json.loads(node.id)
    if isinstance(node, ast.List):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {
            str(ast.literal_eval(key)): _python_value(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)
