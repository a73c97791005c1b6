"""Finding special tokens in text, before anything else looks at it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from motley.text.vocab import TokenType, Vocabulary

SpanPredicate = Callable[[int, int], bool]  # of the characters start … end of a text

_WHITE_SPACE = re.compile(r"\s*")


class SpecialTokens:
    """Splits text into special tokens (ids) and the text between them.

    User-defined tokens are always found; control tokens only where the caller allows them, so that
    "<|im_end|>" in untrusted text is encoded as plain text.
    """

    def __init__(self, vocab: Vocabulary) -> None:
        user_defined = _texts(vocab, TokenType.USER_DEFINED)
        control = _texts(vocab, TokenType.CONTROL, TokenType.UNKNOWN)
        self._control = frozenset(control.values()) - frozenset(user_defined.values())
        self._finder = _Finder(control | user_defined)
        self._right_stripping = vocab.right_stripping_ids

    def split(self, text: str, may_be_control: SpanPredicate) -> Iterator[str | int]:
        """Ids and the text between them. A control token counts only if `may_be_control(start, end)` says so."""

        def counts(start: int, end: int, token: int) -> bool:
            return token not in self._control or may_be_control(start, end)

        position = 0
        for start, end, token in self._finder.find(text, counts):
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
    """Finds all tokens of a set in a text, leftmost first and longest at each place.

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

    def find(self, text: str, counts: Callable[[int, int, int], bool]) -> Iterator[tuple[int, int, int]]:
        """Yields (start, end, id) of matches that count and do not overlap."""
        position = 0
        while self._start and (hit := self._start.search(text, position)):
            start = hit.start()
            found = self._longest(text, start, hit[0], counts)
            if found:
                yield start, start + len(found), self._ids[found]
            position = start + max(len(found), 1)

    def _longest(self, text: str, start: int, key: str, counts: Callable[[int, int, int], bool]) -> str:
        # Tokens of a single character have their own key beside that of the longer ones.
        lengths = self._lengths[key] + (self._lengths.get(key[0], []) if len(key) == 2 else [])
        found = (s for n in lengths if (s := text[start : start + n]) in self._ids)
        return next((s for s in found if counts(start, start + len(s), self._ids[s])), "")


def _texts(vocab: Vocabulary, *types: TokenType) -> dict[str, int]:
    found: dict[str, int] = {}
    for i in vocab.ids_of(*types):
        if vocab.tokens[i]:
            found.setdefault(vocab.tokens[i], i)
    return found
