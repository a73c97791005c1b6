"""Matching literals against text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence

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


def find_first(markers: Sequence[str], text: str, *, final: bool) -> tuple[int, str | None]:
    """The place of the first marker and the marker, the longest of those at one place. Empty markers do not count.

    Without one: the place from which on the text may be the beginning of a marker (its length if none), and None.
    """
    place, found = len(text), None
    for marker in markers:
        if marker:
            at = text.find(marker)
            if at >= 0 and (at < place or found is None or (at == place and len(marker) > len(found))):
                place, found = at, marker
    if final:
        return place, found
    held = hold_from(markers, text)
    if held < place or (held == place and found is not None):  # a longer marker may be coming
        return held, None
    return place, found


def hold_from(markers: Sequence[str], text: str) -> int:
    """The first place from which on the rest of `text` is a true beginning of a marker; its length if none."""
    held = len(text)
    for marker in markers:
        if not marker:
            continue
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while 0 <= at < held:
            if marker.startswith(text[at:]):
                held = at
                break
            at = text.find(marker[0], at + 1)
    return held
