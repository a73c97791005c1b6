"""Answers in gpt-oss' format: messages with a channel each, calls with a recipient.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{…}<|call|>

The prompt ends with "<|start|>assistant", so an answer begins inside a header.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from motley.text.tools.events import Event, EventLog
from motley.text.tools.literals import find_first
from motley.text.tools.parser import new_call_id

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
MAX_HEADER = 512
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-/$]{1,256})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """A `ChatParser` for Harmony. splits_reasoning=False: the channel "analysis" is content."""

    def __init__(self, *, splits_reasoning: bool = True, make_id: Callable[[], str] = new_call_id) -> None:
        self._log = EventLog()
        self._splits_reasoning = splits_reasoning
        self._make_id = make_id
        self._text = ""
        self._body: Callable[[str], None] | None = None  # takes a message's text; None: in a header
        self._is_between = False
        self._is_call = False

    @property
    def has_calls(self) -> bool:
        return self._log.n_calls > 0

    def push(self, piece: str) -> list[Event]:
        self._text += piece
        self._advance(final=False)
        return self._log.take()

    def finish(self) -> list[Event]:
        self._advance(final=True)
        return self._log.take()

    def _advance(self, final: bool) -> None:
        while self._text and (self._read_header(final) if self._body is None else self._read_body(final)):
            pass

    def _read_header(self, final: bool) -> bool:
        at, marker = find_first((MESSAGE, *ENDS[:3]), self._text, final=final)
        if marker != MESSAGE or at > MAX_HEADER:
            if (marker is None and not final and at <= MAX_HEADER) or not self._text:
                return False
            self._body = self._log.content  # no header
            return True
        header, self._text = self._text[:at], self._text[at + len(MESSAGE) :]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None:
            self._is_call = True
            index = self._log.start(self._make_id(), recipient[1])
            self._body = lambda text: self._log.arguments(index, text)
        elif channel is not None and channel[1] == "analysis" and self._splits_reasoning:
            self._body = self._log.reasoning
        else:
            self._body = self._log.content
        return True

    def _read_body(self, final: bool) -> bool:
        assert self._body is not None
        # The beginning of an end marker is not part of arguments that break off.
        at, marker = find_first(ENDS, self._text, final=final and not self._is_call)
        piece, self._text = self._text[:at], self._text[at:]
        # Between two messages there is nothing but the beginning of the next header.
        self._body(piece.lstrip() if self._is_between else piece)
        if piece.strip():
            self._is_between = False
        if marker is None:
            return False
        self._text = self._text[len(marker) :]
        self._is_between, self._is_call = marker != START, False
        self._body = None if marker == START else self._log.content
        return True
