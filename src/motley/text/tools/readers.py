"""Reading calls out of an answer's text, one reader for each style.

A reader gets text from behind a marker on. It takes characters in order and decides by what it has seen, never by how
the text was cut. Until it has announced a call (`EventLog.start`) it can fail, and then all it took is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from motley.text.tools.events import EventLog
from motley.text.tools.format import KEY, TaggedCall, ToolFormat
from motley.text.tools.json_scan import JsonScanner, Step
from motley.text.tools.literals import hold_from, match
from motley.text.tools.schema import types_of, value_from_text

MAX_NAME = 256
_NAME = re.compile(r"[\w.\-/$]*")


class Status(Enum):
    MORE = auto()  # all text so far was taken, or waits for more
    DONE = auto()
    FAILED = auto()


@dataclass
class Context:
    """The context that readers of one answer share. `tools`: the JSON schema of each tool's arguments, by name."""

    log: EventLog
    make_id: Callable[[], str]
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def start(self, name: str) -> int:
        return self.log.start(self.make_id(), name)


class Reader:
    """`read` takes characters from the beginning of `text` and says how many, and whether the call is over.

    `has_started`: a call has been announced; then the reader no longer fails.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.index: int | None = None

    @property
    def has_started(self) -> bool:
        return self.index is not None

    def read(self, text: str, final: bool) -> tuple[int, Status]:
        raise NotImplementedError

    def ended(self) -> Status:
        return Status.DONE if self.has_started else Status.FAILED

    def arguments(self, text: str) -> None:
        if self.index is not None:
            self.context.log.arguments(self.index, text)


class JsonReader(Reader):
    """{"name": …, "arguments": {…}}, with the keys in any order; or {name: {…}}."""

    def __init__(self, context: Context, form: ToolFormat, *, known_names_only: bool = False) -> None:
        super().__init__(context)
        self._form = form.json
        self._known_names_only = known_names_only
        self._scanner = JsonScanner(watch=1)
        self._key: str | None = None  # of the value that is being read
        self._value: list[str] = []
        self._name: str | None = None
        self._arguments: str | None = None  # read before the name
        self._streams = False
        self._is_complete = False

    def read(self, text: str, final: bool) -> tuple[int, Status]:
        streamed: list[str] = []
        for at, c in enumerate(text):
            if self._scanner.depth == 0 and c != "{" and not c.isspace():
                return at, Status.FAILED
            step = self._scanner.feed(c)
            if step is Step.BAD or (step is not Step.NOTHING and not self._consume(step, c)):
                self.arguments("".join(streamed))
                return at, self.ended()
            if self._streams and step is not Step.AFTER:
                streamed.append(c)
                self._streams = step is not Step.END
            elif self._key is not None and step in (Step.NOTHING, Step.START):
                self._value.append(c)
            if self._scanner.is_done:
                self.arguments("".join(streamed))
                return at + 1, self._finished()
        self.arguments("".join(streamed))
        return len(text), self.ended() if final else Status.MORE

    def _consume(self, step: Step, c: str) -> bool:
        """False: this cannot become a call."""
        form = self._form
        if step is Step.START:
            self._key, self._value = self._scanner.key, []
            if form.is_keyed_by_name:
                if c != "{" or self._name is not None or not self._is_name(self._key):
                    return False
                self._name = self._key
            if self._is_arguments() and c == "{" and self._name is not None and not self._is_complete:
                self.index = self.context.start(self._name)
                self._streams = self._is_complete = True
                self._key = None
            return True
        if self._key is None:
            return True  # the end of arguments that were streamed
        text = "".join(self._value) + (c if step is Step.END else "")
        key, self._key = self._key, None
        if key == form.name_key and self._name is None:
            name = json.loads(text)
            if not self._is_name(name):
                return False
            self._name = name
        elif key == form.arguments_key and self._arguments is None:
            self._arguments = text
        return True

    def _is_arguments(self) -> bool:
        return self._form.is_keyed_by_name or self._key == self._form.arguments_key

    def _is_name(self, name: object) -> bool:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not _NAME.fullmatch(name):
            return False
        return not self._known_names_only or name in self.context.tools

    def _finished(self) -> Status:
        if self._name is None:
            return Status.FAILED
        if not self._is_complete:
            text = self._arguments or "{}"
            if text.startswith('"'):  # JSON in a string
                text = json.loads(text)
                if not _is_text(text):
                    return Status.FAILED
            self.index = self.context.start(self._name)
            self.arguments("{}" if text.strip() in ("", "null") else text)
        return Status.DONE


class NamedReader(Reader):
    """name, a marker, then arguments as JSON."""

    def __init__(self, context: Context, form: ToolFormat) -> None:
        super().__init__(context)
        self._known_names_only = bool(form.primer)  # each answer begins as a call does
        self._form = form.named
        self._steps: list[Callable[[str, int], int | None]] = [
            self._read_name,
            self._end(self._form.name_end[0]),
        ]
        if self._form.id_start is not None:
            self._steps.insert(0, self._past(self._form.id_start))
        if len(self._form.name_end) > 1:
            self._steps.append(self._past(self._form.name_end[1]))
        self._name = ""
        self._scanner = JsonScanner(watch=0)

    def read(self, text: str, final: bool) -> tuple[int, Status]:
        at = 0
        while self._steps:
            end = self._steps[0](text, at)
            if end is None or end < 0:
                return at, Status.MORE if end is None and not final else Status.FAILED
            self._steps.pop(0)
            at = end
        begin = at
        for place in range(at, len(text)):
            c = text[place]
            if self.index is None:
                if c.isspace():
                    begin = place + 1
                    continue
                if c != "{":
                    return place, Status.FAILED
                self.index = self.context.start(self._name)
            if self._scanner.feed(c) is Step.BAD:
                self.arguments(text[begin:place])
                return place, Status.DONE
            if self._scanner.is_done:
                self.arguments(text[begin : place + 1])
                return place + 1, Status.DONE
        self.arguments(text[begin:])
        return len(text), self.ended() if final else Status.MORE

    def _read_name(self, text: str, start: int) -> int | None:
        at, self._name = read_name(text, start)
        return -1 if at and self._known_names_only and self._name not in self.context.tools else at

    def _end(self, literal: str) -> Callable[[str, int], int | None]:
        return lambda text, start: match(literal, text, start)

    def _past(self, literal: str) -> Callable[[str, int], int | None]:
        """Behind the literal, which must come within a few characters."""

        def past(text: str, start: int) -> int | None:
            at = text.find(literal.strip(), start)
            if 0 <= at <= start + MAX_NAME:
                return at + len(literal.strip())
            return -1 if len(text) - start > MAX_NAME + len(literal) else None

        return past


def read_name(text: str, start: int) -> tuple[int | None, str]:
    """The end of a function's name and the name; None while it may continue, -1 where there is none."""
    while start < len(text) and text[start].isspace():
        start += 1
    found = _NAME.match(text, start)
    assert found is not None
    if len(found[0]) > MAX_NAME:
        return -1, ""
    if found.end() == len(text):
        return None, ""
    return (found.end(), found[0]) if found[0] else (-1, "")


class TaggedReader(Reader):
    """name, then each argument as raw text between tags. The schema says which of them are not text."""

    def __init__(self, context: Context, form: ToolFormat) -> None:
        super().__init__(context)
        assert form.tagged is not None
        self._form: TaggedCall = form.tagged
        self._call_end = form.call_end
        text_start, json_start = self._form.value_start, self._form.json_start
        n = next((i for i, (a, b) in enumerate(zip(text_start, json_start, strict=False)) if a != b), 0)
        self._has_types = text_start != json_start
        self._key_end = text_start[:n] if self._has_types else text_start
        self._type_end = text_start[text_start.find('"', n) :] if self._has_types else ""
        self._text_type = text_start[n : text_start.find('"', n)] if self._has_types else ""
        self._step: Callable[[str, int, bool], tuple[int, bool | None]] = self._read_name
        self._name, self._key, self._n_read = "", "", 0
        self._types: frozenset[str] = frozenset()
        self._buffer: list[str] | None = None  # of a value that is not text
        self._is_over = False

    def read(self, text: str, final: bool) -> tuple[int, Status]:
        at = 0
        while True:
            at, progress = self._step(text, at, final)
            if self._is_over:
                return at, Status.DONE
            if progress is None:
                if final and self.has_started:
                    return self._truncated(text, at), Status.DONE
                return at, Status.FAILED if final else Status.MORE
            if not progress:
                if self.has_started:  # what follows is no parameter
                    self.arguments("}" if self._n_read else "{}")
                    return at, Status.DONE
                return at, Status.FAILED

    def _truncated(self, text: str, at: int) -> int:
        if self._step == self._read_value:
            self.arguments("".join(self._buffer or ()))  # what is left is the beginning of an end marker
            return len(text)
        return at

    def _read_name(self, text: str, start: int, final: bool) -> tuple[int, bool | None]:
        at, name = read_name(text, start)
        if at is None or at < 0:
            return start, None if at is None else False
        self._name, self._step = name, self._read_name_end
        return at, True

    def _read_name_end(self, text: str, start: int, final: bool) -> tuple[int, bool | None]:
        at = match(self._form.name_end, text, start)
        if at is None or at < 0:
            return start, None if at is None else False
        self._step = self._read_parameter
        return at, True

    def _read_parameter(self, text: str, start: int, final: bool) -> tuple[int, bool | None]:
        key = match(self._form.key_start, text, start)
        end = match(self._call_end, text, start)
        if end is not None and end >= 0 and self._call_end.strip():
            self._start()
            self.arguments("}" if self._n_read else "{}")
            self._is_over = True
            return start, True
        if end is None and not final:
            return start, None  # one marker may be the beginning of the other
        if key is not None and key >= 0:
            self._start()
            self._step = self._read_key
            return key, True
        return start, None if key is None or end is None else False

    def _start(self) -> None:
        if self.index is None:
            self.index = self.context.start(self._name)

    def _read_key(self, text: str, start: int, final: bool) -> tuple[int, bool | None]:
        mark = self._key_end.split()[0]
        at = text.find(mark, start)
        if at < 0 or at - start > MAX_NAME:
            return start, None if at < 0 and len(text) - start <= MAX_NAME + len(mark) else False
        end = match(self._key_end, text, at)
        if end is None or end < 0:
            return start, None if end is None else False
        is_text: bool | None = None
        if self._has_types:
            close = text.find(self._type_end, end)
            if close < 0 or close - end > MAX_NAME:
                return start, None if close < 0 and len(text) - end <= MAX_NAME + len(
                    self._type_end
                ) else False
            is_text = text[end:close] == self._text_type
            end = close + len(self._type_end)
        elif self._form.value_start.endswith("\n"):
            if end == len(text):
                return start, None
            end += text[end] == "\n"
        self._key, self._step = text[start:at].strip(), self._read_value
        self._begin_value(is_text)
        return end, True

    def _begin_value(self, is_text: bool | None) -> None:
        schema = self.context.tools.get(self._name, {})
        properties = schema.get("properties")
        known = properties.get(self._key) if isinstance(properties, Mapping) else None
        self._types = types_of(known, schema)
        if is_text is not None:
            self._types = frozenset({"string"}) if is_text else self._types
        key = json.dumps(self._key, ensure_ascii=False)
        self.arguments(("{" if not self._n_read else ", ") + key + ": ")
        self._n_read += 1
        self._buffer = None if self._types == {"string"} and not self._form.has_cdata else []
        if self._buffer is None:
            self.arguments('"')

    def _read_value(self, text: str, start: int, final: bool) -> tuple[int, bool | None]:
        end = self._form.value_end.replace(KEY, self._key).strip()
        lead = "\n" if self._form.value_end.startswith("\n") else ""
        at = text.find(end, start)
        if at < 0:
            held = start + hold_from((lead + end, end), text[start:])
            self._value_piece(text[start:held])
            return held, None
        stop = at - 1 if lead and at > start and text[at - 1] == "\n" else at
        self._value_piece(text[start:stop])
        if self._buffer is None:
            self.arguments('"')
        else:
            value = "".join(self._buffer)
            if self._form.has_cdata:
                value = value.removeprefix("<![CDATA[").removesuffix("]]>")
            self.arguments(value_from_text(value, self._types))
        self._step = self._read_parameter
        return at + len(end), True

    def _value_piece(self, text: str) -> None:
        if self._buffer is None:
            self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._buffer.append(text)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
