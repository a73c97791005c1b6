"""How an answer is written: as it comes, with reasoning dimmed on a terminal, or as rendered Markdown."""

from __future__ import annotations

import re
import sys
from typing import Protocol

from rich.console import Console
from rich.text import Text

_THINK, _END_THINK = "<think>", "</think>"
_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"
_FENCE = re.compile(r"^\s*(```|~~~)", re.MULTILINE)


class Painter(Protocol):
    """Takes an answer piece by piece and writes it to standard output."""

    def write(self, piece: str) -> None: ...

    def finish(self) -> None:
        """Writes what was kept back, and ends the last line."""
        ...


def make_painter(*, renders_markdown: bool = False, starts_in_thought: bool = False) -> Painter:
    """The painter for the current sys.stdout. Only a terminal gets colours, Markdown, and no control characters."""
    if not sys.stdout.isatty():
        return PlainPainter()
    if renders_markdown:
        return MarkdownPainter()
    return ThoughtPainter(starts_in_thought)


class PlainPainter:
    """Writes the answer as it is."""

    def __init__(self) -> None:
        self._last = ""

    def write(self, piece: str) -> None:
        if piece:
            self._last = piece
            sys.stdout.write(piece)
            sys.stdout.flush()

    def finish(self) -> None:
        if not self._last.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()


class ThoughtPainter(PlainPainter):
    """Writes for a terminal: what is between <think> and </think> is dim, and control characters are escaped.

    `is_thinking`: the prompt has ended with <think>, so that the answer begins in a thought.
    """

    def __init__(self, is_thinking: bool = False) -> None:
        super().__init__()
        self._is_thinking = is_thinking
        self._kept = ""  # the beginning of what may become a tag
        if is_thinking:
            sys.stdout.write(_DIM)

    def write(self, piece: str) -> None:
        text = self._kept + piece
        out = ""
        while (index := text.find(self._tag)) >= 0:
            end = index + len(self._tag)
            shown = harmless(text[:end]) if self._is_thinking else harmless(text[:index])
            out += shown + (_NOT_DIM if self._is_thinking else _DIM + _THINK)
            self._is_thinking = not self._is_thinking
            text = text[end:]
        n_kept = next((n for n in range(len(self._tag) - 1, 0, -1) if text.endswith(self._tag[:n])), 0)
        self._kept = text[len(text) - n_kept :]
        super().write(out + harmless(text[: len(text) - n_kept]))

    def finish(self) -> None:
        super().write(harmless(self._kept) + (_NOT_DIM if self._is_thinking else ""))
        super().finish()

    @property
    def _tag(self) -> str:
        return _END_THINK if self._is_thinking else _THINK


class MarkdownPainter:
    """Renders Markdown. A paragraph, list or code block is written when it is complete."""

    def __init__(self) -> None:
        self._text = ""
        self._console = Console(highlight=False)

    def write(self, piece: str) -> None:
        self._text += piece
        while (end := self._end_of_block()) is not None:
            self._render(self._text[:end])
            self._text = self._text[end:].lstrip("\n")

    def finish(self) -> None:
        self._render(self._text)
        self._text = ""
        sys.stdout.flush()

    def _end_of_block(self) -> int | None:
        """Where the first complete block ends: at an empty line that is not in a code block."""
        for found in re.finditer(r"\n\s*\n", self._text):
            if len(_FENCE.findall(self._text[: found.start()])) % 2 == 0:
                return found.end()
        return None

    def _render(self, text: str) -> None:
        text = harmless(text.strip("\n"))
        if not text:
            return
        is_thought = _THINK in text or _END_THINK in text
        from rich.markdown import Markdown  # takes as long to import as all the rest of rich

        self._console.print(Text(text, style="dim") if is_thought else Markdown(text))
        self._console.print()


def harmless(text: str) -> str:
    """`text` without characters that a terminal would execute; lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    # Unicode's spaces and joiners are not "printable", but harmless; C0, C1 and surrogates are not.
    is_control = ord(char) < 32 or 127 <= ord(char) < 160 or 0xD800 <= ord(char) < 0xE000
    return char.encode("unicode_escape").decode() if is_control else char
