"""One JSON value, read character by character."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_SPACE = " \t\n\r"
MAX_DEPTH = 200


class _State(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()  # after "["
    KEY_OR_END = auto()  # after "{"
    KEY = auto()
    COLON = auto()
    COMMA = auto()
    STRING = auto()
    SCALAR = auto()
    DONE = auto()


class Step(Enum):
    """The effect of a character, at the watched depth."""

    NOTHING = auto()
    START = auto()  # the first character of a value
    END = auto()  # the last character of a value
    AFTER = auto()  # the first character after a number or a word, which is not part of it
    BAD = auto()  # no JSON has this character here


class JsonScanner:
    """Says where the values at `watch` levels of nesting begin and end. The value is an object or a list.

    `key`: the key of the value at the watched depth, if that is an object.
    """

    def __init__(self, watch: int = 1) -> None:
        self.watch = watch
        self.stack: list[str] = []
        self.keys: list[str | None] = []
        self._state = _State.VALUE
        self._is_key = False
        self._escape = 0  # characters of an escape that are still to come
        self._lexeme: list[str] = []

    @property
    def depth(self) -> int:
        return len(self.stack)

    @property
    def is_done(self) -> bool:
        return self._state is _State.DONE

    @property
    def key(self) -> str | None:
        return self.keys[self.watch - 1] if len(self.keys) >= self.watch else None

    def feed(self, c: str) -> Step:
        state = self._state
        if state is _State.STRING:
            return self._in_string(c)
        if state is _State.SCALAR:
            if c not in ",]}" + _SPACE:
                self._lexeme.append(c)
                return Step.NOTHING if len(self._lexeme) < 4096 else Step.BAD
            if not _SCALAR.fullmatch("".join(self._lexeme)):
                return Step.BAD
            ended = self.depth == self.watch
            self._state = _State.COMMA
            step = self._structure(c)
            return Step.AFTER if ended and step is not Step.BAD else step
        return self._structure(c)

    def _structure(self, c: str) -> Step:
        state = self._state
        if c in _SPACE:
            return Step.NOTHING
        if state in (_State.VALUE, _State.VALUE_OR_END) and not (c == "]" and state is _State.VALUE_OR_END):
            return self._begin(c)
        if state in (_State.KEY, _State.KEY_OR_END) and c == '"':
            self._state, self._is_key, self._lexeme = _State.STRING, True, ['"']
            return Step.NOTHING
        if state is _State.COLON and c == ":":
            self._state = _State.VALUE
            return Step.NOTHING
        if state is _State.COMMA and c == ",":
            self._state = _State.KEY if self.stack[-1] == "{" else _State.VALUE
            return Step.NOTHING
        may_close = state in (_State.COMMA, _State.KEY_OR_END, _State.VALUE_OR_END)
        if may_close and self.stack and c == ("}" if self.stack[-1] == "{" else "]"):
            self.stack.pop()
            self.keys.pop()
            return self._ended()
        return Step.BAD

    def _begin(self, c: str) -> Step:
        is_watched = self.depth == self.watch
        if c in "{[":
            if self.depth == MAX_DEPTH:
                return Step.BAD
            self.stack.append(c)
            self.keys.append(None)
            self._state = _State.KEY_OR_END if c == "{" else _State.VALUE_OR_END
        elif not self.stack:
            return Step.BAD
        elif c == '"':
            self._state, self._is_key, self._lexeme = _State.STRING, False, []
        elif c in "-0123456789tfn":
            self._state, self._lexeme = _State.SCALAR, [c]
        else:
            return Step.BAD
        return Step.START if is_watched else Step.NOTHING

    def _ended(self) -> Step:
        self._state = _State.COMMA if self.stack else _State.DONE
        return Step.END if self.depth == self.watch else Step.NOTHING

    def _in_string(self, c: str) -> Step:
        if self._is_key:
            self._lexeme.append(c)
        if self._escape:
            if self._escape == 5:  # the character after the backslash
                if c not in '"\\/bfnrtu':
                    return Step.BAD
                self._escape = 4 if c == "u" else 0
            elif c in "0123456789abcdefABCDEF":
                self._escape -= 1
            else:
                return Step.BAD
        elif c == "\\":
            self._escape = 5
        elif c == '"':
            if self._is_key:
                self.keys[-1] = _decoded("".join(self._lexeme))
                self._state = _State.COLON
                return Step.NOTHING
            return self._ended()
        elif c < " ":
            return Step.BAD
        return Step.NOTHING


def _decoded(text: str) -> str:
    return str(json.loads(text))
