"""Text that knows which of its characters a template wrote itself.

A chat prompt is template and messages in one string. Control tokens such as "<|im_end|>" count only where the template
wrote every character of them; the same characters in a message are plain text (`Tokenizer.encode_marked`).

`MarkedText` carries a mask as long as the text. Every operation that a template can apply to text (see `sandbox`)
carries the mask along or returns a plain `str`. Characters of a plain `str` count as the user's: what is not known to
be the template's never becomes a control token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

OWN, FOREIGN = "t", "u"  # written by the template; from any other source

# Texts that no user writes: values of "role" of which templates build control tokens, such as "<|" + role + "|>".
ROLES = frozenset({"assistant", "developer", "function", "model", "system", "tool", "user"})


class MarkedText(str):
    """A text and, for each of its characters, OWN or FOREIGN."""

    __slots__ = ("mask",)
    mask: str

    def __new__(cls, text: str, mask: str) -> MarkedText:
        assert len(text) == len(mask), "one mark for each character"
        made = super().__new__(cls, text)
        made.mask = mask
        return made

    def __str__(self) -> str:  # Jinja calls str() on what it puts out
        return self

    def is_own(self, start: int, end: int) -> bool:
        """Whether the template wrote all characters of text[start:end]."""
        return self.mask.find(FOREIGN, start, end) < 0

    def __add__(self, other: str) -> MarkedText:
        if not isinstance(other, str):
            return NotImplemented
        return MarkedText(str.__add__(self, other), self.mask + mask_of(other))

    def __radd__(self, other: str) -> MarkedText:
        if not isinstance(other, str):
            return NotImplemented
        return MarkedText(str.__add__(other, self), mask_of(other) + self.mask)

    def __mul__(self, times: SupportsIndex) -> MarkedText:
        return MarkedText(str.__mul__(self, times), self.mask * times)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> MarkedText:
        return MarkedText(str.__getitem__(self, key), self.mask[key])

    def _from(self, start: int, part: str) -> MarkedText:
        """`part`, which is in this text from `start` on."""
        return MarkedText(part, self.mask[start : start + len(part)])

    def lstrip(self, chars: str | None = None) -> MarkedText:
        part = str.lstrip(self, chars)
        return self._from(len(self) - len(part), part)

    def rstrip(self, chars: str | None = None) -> MarkedText:
        return self._from(0, str.rstrip(self, chars))

    def strip(self, chars: str | None = None) -> MarkedText:
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str) -> MarkedText:
        part = str.removeprefix(self, prefix)
        return self._from(len(self) - len(part), part)

    def removesuffix(self, suffix: str) -> MarkedText:
        return self._from(0, str.removesuffix(self, suffix))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        position, found = 0, []
        for part in str.split(self, sep, maxsplit):
            if sep is None:  # there is only white space in between, in which no part can be found
                position = str.find(self, part, position)
            found.append(self._from(position, part))
            position += len(part) + len(sep or "")
        return list(found)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        end, found = len(self), []
        for part in reversed(str.rsplit(self, sep, maxsplit)):
            start = str.rfind(self, part, 0, end) if sep is None else end - len(part)
            found.append(self._from(start, part))
            end = start - len(sep or "")
        return list(reversed(found))

    def splitlines(self, keepends: bool = False) -> list[str]:
        position, found = 0, []
        for line, whole in zip(str.splitlines(self, keepends), str.splitlines(self, True), strict=True):
            found.append(self._from(position, line))
            position += len(whole)
        return list(found)

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, between, after = str.partition(self, sep)
        n = len(before) + len(between)
        return self._from(0, before), self._from(len(before), between), self._from(n, after)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:  # `new` between all characters: no template needs to know what is whose then
            return plain(self).replace(old, new, count)
        return join(new, MarkedText.split(self, old, count))

    def lower(self) -> MarkedText:
        return self._recased(str.lower(self))

    def upper(self) -> MarkedText:
        return self._recased(str.upper(self))

    def capitalize(self) -> MarkedText:
        return self._recased(str.capitalize(self))

    def title(self) -> MarkedText:
        return self._recased(str.title(self))

    def swapcase(self) -> MarkedText:
        return self._recased(str.swapcase(self))

    def casefold(self) -> MarkedText:
        return self._recased(str.casefold(self))

    def _recased(self, text: str) -> MarkedText:
        """The same characters in another case; a few, such as "ß", become several: then all count as foreign."""
        return MarkedText(text, self.mask if len(text) == len(self) else FOREIGN * len(text))


def own(text: str) -> MarkedText:
    """Text that the template itself contains."""
    return MarkedText(text, OWN * len(text))


def mask_of(text: str) -> str:
    return text.mask if isinstance(text, MarkedText) else FOREIGN * len(text)


def join(separator: str, texts: Iterable[str]) -> MarkedText:
    """`separator.join(texts)`, with all marks."""
    texts = list(texts)
    return MarkedText(str.join(separator, texts), mask_of(separator).join(map(mask_of, texts)))


def plain(text: str) -> str:
    """The same characters without marks."""
    return "".join((text,))  # which makes a str of a subclass
