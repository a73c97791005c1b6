"""The format for templates without tools: one JSON object with "tool_call", "tool_calls" or "response"."""

from __future__ import annotations

import json
from typing import Any

from motley.text.tools.json_scan import JsonScanner, Step
from motley.text.tools.readers import Context, Reader, Status


class GenericReader(Reader):
    """Calls are announced when they are whole; a response is passed on as it comes."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._scanner = JsonScanner(watch=1)
        self._key: str | None = None
        self._value: list[str] = []
        self._response: StringDecoder | None = None
        self._has_response = False

    @property
    def has_started(self) -> bool:
        return self._has_response or super().has_started

    def read(self, text: str, final: bool) -> tuple[int, Status]:
        for at, c in enumerate(text):
            if self._scanner.depth == 0 and c != "{" and not c.isspace():
                return at, Status.FAILED
            step = self._scanner.feed(c)
            if step is Step.BAD or (step is not Step.NOTHING and not self._consume(step, c)):
                return at, self.ended()
            if self._response is not None and step is Step.NOTHING:
                self.context.log.content(self._response.push(c))
            elif self._key is not None and step is not Step.AFTER:
                self._value.append(c)
                if step is Step.END and not self._ended_value():
                    return at, self.ended()
            if self._scanner.is_done:
                return at + 1, self.ended()
        return len(text), self.ended() if final else Status.MORE

    def _consume(self, step: Step, c: str) -> bool:
        if step is Step.START:
            self._key, self._value = self._scanner.key, []
            if self._key == "response" and c == '"' and not self._has_response:
                self._response, self._has_response = StringDecoder(), True
            return True
        if self._response is not None:
            self._response, self._key = None, None
            return True
        return step is Step.END or self._ended_value()

    def _ended_value(self) -> bool:
        key, self._key = self._key, None
        text = "".join(self._value)
        if key == "response" and not self._has_response:
            self._has_response = True
            self.context.log.content(text.strip())
        if key not in ("tool_call", "tool_calls"):
            return True
        value = json.loads(text)
        calls = value if isinstance(value, list) else [value]
        if not calls or not all(_is_call(call) for call in calls):
            return False
        for call in calls:
            arguments = call.get("arguments", call.get("parameters", {}))
            self.index = self.context.start(call["name"])
            self.arguments(arguments if isinstance(arguments, str) else json.dumps(arguments))
        return True


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return False
    arguments = call.get("arguments", call.get("parameters", {}))
    try:
        call["name"].encode()
        return isinstance(arguments, dict) or (isinstance(arguments, str) and bool(arguments.encode()))
    except UnicodeEncodeError:
        return False


class StringDecoder:
    """The inside of a JSON string → its text, character by character."""

    _PLAIN = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}  # noqa: RUF012

    def __init__(self) -> None:
        self._escape = ""
        self._high = ""  # the first half of a surrogate pair

    def push(self, c: str) -> str:
        if not self._escape:
            if c == "\\":
                self._escape = c
                return ""
            lost, self._high = "\ufffd" if self._high else "", ""
            return lost + c
        self._escape += c
        if self._escape.startswith("\\u"):
            return self._unicode() if len(self._escape) == 6 else ""
        self._escape = ""
        lost, self._high = "\ufffd" if self._high else "", ""
        return lost + self._PLAIN.get(c, c)

    def _unicode(self) -> str:
        code, self._escape = int(self._escape[2:], 16), ""
        if self._high and 0xDC00 <= code < 0xE000:
            high, self._high = ord(self._high), ""
            return chr(0x10000 + ((high - 0xD800) << 10) + code - 0xDC00)
        lost, self._high = "\ufffd" if self._high else "", ""
        if 0xD800 <= code < 0xDC00:
            self._high = chr(code)
            return lost
        return lost + ("\ufffd" if 0xDC00 <= code < 0xE000 else chr(code))
