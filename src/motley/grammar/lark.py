"""Changes in the text of a Lark grammar. It is not parsed: strings, regexes, comments and %json are told apart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from motley.errors import RequestError

# A class in brackets is short: without the limit, "/[/[/[…" would be read again from every slash.
_PARTS = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<comment>(?://|\#)[^\n]*)"
    r"|(?P<regex>/(?:\\.|\[(?:\\.|[^\]\\\n]){0,200}+\]|[^/\\\n\[])++/[a-z]*)"
    r"|(?P<json>%json\s*(?=\{))"
    r"|(?P<special><[^<>\s\"]+>)",
    re.DOTALL,
)


def parts(text: str) -> Iterator[tuple[str, str]]:
    """The text as (kind, piece): "text", "comment", "regex", "json" (with its value), "special" or "" for the rest."""
    at = 0
    while match := _PARTS.search(text, at):
        kind = match.lastgroup or ""
        yield "", text[at : match.start()]
        at = match.end()
        if kind == "json":
            at = _end_of_json(text, at)
            yield kind, text[match.end() : at]
        else:
            yield kind, match[0]
    yield "", text[at:]


def with_schemas(text: str, change: Callable[[Any], Any]) -> str:
    """The grammar with each %json schema changed."""
    pieces = [
        f"%json {json.dumps(change(json.loads(piece)))}" if kind == "json" else piece
        for kind, piece in parts(text)
    ]
    return "".join(pieces)


def with_texts_of(text: str, is_text: Callable[[str], bool]) -> str:
    """The grammar with the string "<name>" in place of the special token <name>, where `is_text("<name>")`."""
    pieces = []
    for kind, piece in parts(text):
        if kind == "special" and is_text(piece):
            pieces.append(json.dumps(piece, ensure_ascii=False))
        else:
            pieces.append(f"%json {piece}" if kind == "json" else piece)
    return "".join(pieces)


def _end_of_json(text: str, at: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(text, at)[1]
    except (ValueError, RecursionError) as error:
        raise RequestError(f"grammar: what follows %json is not JSON: {str(error)[:200]}") from None
