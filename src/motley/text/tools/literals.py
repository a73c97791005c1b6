"""Matching literals against text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable

from motley.text.tools.format import NUMBER

# White space, and places where a model may put some: between a tag and a bracket.
_BREAK = re.compile(r"\s+|(?<=[>\]])(?=[\[{])|(?<=[\]}])(?=<)")


def match(literal: str, text: str, start: int = 0) -> int | None:
    """The end of `literal` in text[start:], with any white space for white space and at its ends.

    -1: the text does not begin with the literal. None: more text is needed. White space after the literal is not taken.
    """
    at = start
    for word in _words(literal):
        while at < len(text) and text[at].isspace():
            at += 1
        for c in word:
            if at == len(text):
                return None
            if c != NUMBER:
                if text[at] != c:
                    return -1
                at += 1
                continue
            if not text[at].isdigit():
                return -1
            while at < len(text) and text[at].isdigit():
                at += 1
            if at == len(text):
                return None  # more digits may come
    return at


def _words(literal: str) -> list[str]:
    return [word for word in _BREAK.split(literal.strip()) if word]


def find_first(markers: Iterable[str], text: str, *, final: bool) -> tuple[int, str | None]:
    """The place of the first marker and the marker, the longest of those at one place.

    Without one: the place from which on the text may be the beginning of a marker (its length if none), and None.
    """
    markers = [m for m in markers if m]
    best: tuple[int, int, str] | None = None
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (best is None or (at, -len(marker)) < best[:2]):
            best = at, -len(marker), marker
    held = len(text) if final else hold_from(markers, text)
    if best is None or held < best[0]:
        return held, None
    at = best[0]
    if not final and any(len(m) > len(text) - at and m.startswith(text[at:]) for m in markers):
        return at, None  # a longer marker may be coming at the same place
    return at, best[2]


def hold_from(markers: Iterable[str], text: str) -> int:
    """The first place from which on the rest of `text` is a true beginning of a marker; its length if none."""
    markers = list(markers)
    longest = max(map(len, markers), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(len(m) > len(text) - at and m.startswith(text[at:]) for m in markers):
            return at
    return len(text)
