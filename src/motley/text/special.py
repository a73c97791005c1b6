"""Finding special tokens in text, before anything else looks at it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from motley.text.vocab import TokenType, Vocabulary

_WHITE_SPACE = re.compile(r"\s*")


class SpecialTokens:
    """Splits text into special tokens (ids) and the text between them.

    User-defined tokens are always found; control tokens only when asked for, so that text from a stranger can
    be encoded without its "<|im_end|>" meaning anything.
    """

    def __init__(self, vocab: Vocabulary) -> None:
        user_defined = _texts(vocab, TokenType.USER_DEFINED)
        control = _texts(vocab, TokenType.CONTROL, TokenType.UNKNOWN)
        self._always = _Finder(user_defined)
        self._all = _Finder(control | user_defined)
        self._right_stripping = vocab.right_stripping_ids

    def split(self, text: str, *, parse_special: bool) -> Iterator[str | int]:
        position = 0
        for start, end, token in (self._all if parse_special else self._always).find(text):
            if start < position:
                continue  # in the white space that the previous token has taken
            if position < start:
                yield text[position:start]
            yield token
            position = end
            if token in self._right_stripping:
                position = _WHITE_SPACE.match(text, end).end()  # type: ignore[union-attr]  # always matches
        if position < len(text):
            yield text[position:]


class _Finder:
    """All tokens of a set in a text, leftmost first and longest at each place.

    A regular expression finds the places where a token may start by its first two characters; the dictionary
    decides. (One alternative per token would be slow: some vocabularies have thousands.)
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        lengths: dict[str, set[int]] = {}
        for text in ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}
        starts = sorted(self._lengths, key=len, reverse=True)
        self._start = re.compile("|".join(map(re.escape, starts))) if starts else None

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yields (start, end, id) of matches that do not overlap."""
        position = 0
        while self._start and (hit := self._start.search(text, position)):
            start = hit.start()
            found = self._longest(text, start, hit[0])
            if found:
                yield start, start + len(found), self._ids[found]
            position = start + max(len(found), 1)

    def _longest(self, text: str, start: int, key: str) -> str:
        # Tokens of a single character have their own key beside that of the longer ones.
        lengths = self._lengths[key] + (self._lengths.get(key[0], []) if len(key) == 2 else [])
        return next((s for n in lengths if (s := text[start : start + n]) in self._ids), "")


def _texts(vocab: Vocabulary, *types: TokenType) -> dict[str, int]:
    found: dict[str, int] = {}
    for i in vocab.ids_of(*types):
        if vocab.tokens[i]:
            found.setdefault(vocab.tokens[i], i)
    return found
