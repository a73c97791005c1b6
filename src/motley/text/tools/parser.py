"""An answer's text, piece by piece → reasoning, content and tool calls.

The events of all pieces add up to the same answer however the text was cut. Nothing raises: text that is no call after
all becomes content, the text of a call that breaks off stays in its arguments. White space around reasoning and calls
is dropped.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from motley.text.tools.events import Event, EventLog, ParsedAnswer
from motley.text.tools.format import ToolFormat
from motley.text.tools.literals import find_first
from motley.text.tools.readers import Context, Status
from motley.text.tools.section import SectionReader

PYTHON_TAG = "<|python_tag|>"  # Llama may put it before a call


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


class _Mode(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALLS = auto()


class ChatParser:
    """One for each answer: `push` pieces of its text, `finish` at its end.

    tools: the JSON schema of the arguments of each tool, by name; empty: calls are not looked for. is_reasoning:
    whether the prompt has opened the reasoning already. splits_reasoning: otherwise reasoning stays in the content.
    """

    def __init__(
        self,
        form: ToolFormat,
        *,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        is_reasoning: bool = False,
        splits_reasoning: bool = True,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._log = EventLog()
        self._context = Context(self._log, make_id, tools or {})
        self._form = form
        self._has_tools = bool(tools)
        self._reasoning = form.reasoning if splits_reasoning else None
        self._mode = _Mode.REASONING if is_reasoning and self._reasoning else _Mode.CONTENT
        self._calls_from = self._mode
        self._calls: SectionReader | None = None
        self._text = form.primer
        self._spaces = ""  # white space that may be at an end
        self._has_text = False  # of the current mode
        self._drops_spaces = self._mode is _Mode.REASONING

    @property
    def has_calls(self) -> bool:
        return self._log.n_calls > 0

    def push(self, piece: str) -> list[Event]:
        self._text += piece
        self._advance(final=False)
        return self._log.take()

    def finish(self) -> list[Event]:
        """The events of what was held back."""
        self._advance(final=True)
        if self._mode is _Mode.CONTENT and not self.has_calls and (self._has_text or not self._drops_spaces):
            self._log.content(self._spaces)
        self._spaces = ""
        return self._log.take()

    def _advance(self, final: bool) -> None:
        while self._text:
            match self._mode:
                case _Mode.CALLS:
                    progress = self._read_calls(final)
                case _Mode.REASONING:
                    progress = self._read_reasoning(final)
                case _Mode.CONTENT:
                    progress = self._read_content(final)
            if not progress:
                break
        if final and self._mode is _Mode.CALLS:
            self._read_calls(final)

    def _read_reasoning(self, final: bool) -> bool:
        assert self._reasoning is not None
        end = self._reasoning.end.strip()
        trigger = self._form.trigger if self._has_tools else ""
        again = "" if self._has_text else self._reasoning.start.strip()  # which the prompt has already
        at, marker = find_first((end, trigger, again), self._text, final=final)
        is_late = bool(again) and marker == again and bool(self._text[:at].strip())
        self._emit(self._text[:at])
        self._text = self._text[at:]
        if marker is None or is_late:
            return is_late
        self._text = self._text[len(marker) :]
        if marker == again:
            return True
        if marker == trigger:
            self._enter_calls()
        else:
            self._enter(_Mode.CONTENT, drops_spaces=True)
        return True

    def _read_content(self, final: bool) -> bool:
        form = self._form
        trigger = form.trigger if self._has_tools else ""
        is_bare = self._has_tools and not trigger
        if is_bare and not self._has_text:
            begin = self._text.lstrip()
            if begin.startswith("{"):
                self._emit(self._text[: len(self._text) - len(begin)])
                self._text = begin
                self._enter_calls()
                return True
        start = self._reasoning.start.strip() if self._reasoning and not self._has_text else ""
        end = self._reasoning.end.strip() if self._reasoning and not self._has_text else ""
        tag = PYTHON_TAG if is_bare and not self._has_text else ""
        markers = (trigger, start, end, form.content_start, form.content_end, tag)
        at, marker = find_first(markers, self._text, final=final)
        is_late = bool(marker) and marker in (start, end, tag) and bool(self._text[:at].strip())
        self._emit(self._text[:at])
        self._text = self._text[at:]
        if marker is None or is_late:  # late: there is text before, so it is text too
            return is_late
        self._text = self._text[len(marker) :]
        if marker == trigger:
            self._enter_calls()
        elif marker == start:
            self._enter(_Mode.REASONING, drops_spaces=True)
        else:
            self._drops_spaces = True
            self._spaces = ""
        return True

    def _enter(self, mode: _Mode, *, drops_spaces: bool) -> None:
        self._mode, self._has_text, self._spaces, self._drops_spaces = mode, False, "", drops_spaces

    def _enter_calls(self) -> None:
        self._calls_from, self._mode = self._mode, _Mode.CALLS
        self._calls = SectionReader(self._context, self._form)

    def _read_calls(self, final: bool) -> bool:
        assert self._calls is not None
        n_before = self._log.n_calls
        self._text, status = self._calls.read(self._text, final)
        if self._log.n_calls > n_before:
            self._calls_from = _Mode.CONTENT
        if status is Status.MORE:
            return False
        raw, self._calls = self._calls.raw, None
        self._mode = self._calls_from
        if status is Status.FAILED:
            self._emit(raw)
        else:
            self._enter(_Mode.CONTENT, drops_spaces=True)
        return True

    def _emit(self, text: str) -> None:
        """Text of the current mode; white space at its end waits for more."""
        if not self._has_text and self._drops_spaces:
            text = text.lstrip()
        text = self._spaces + text
        body = text.rstrip()
        self._spaces = text[len(body) :]
        if not body:
            return
        self._has_text = True
        if self._mode is _Mode.REASONING:
            self._log.reasoning(body)
        else:
            self._log.content(body)


def parse_answer(parser: ChatParser, text: str) -> ParsedAnswer:
    """A whole answer at once."""
    answer = ParsedAnswer().add(parser.push(text))
    return answer.add(parser.finish())
