"""The parser of answers in which nothing but content is looked for."""

from __future__ import annotations

from motley.text.tools import ContentDelta, Event


class PlainParser:
    """A parser for which all text is content."""

    has_calls = False

    def push(self, piece: str) -> list[Event]:
        return [ContentDelta(piece)] if piece else []

    def finish(self) -> list[Event]:
        return []
