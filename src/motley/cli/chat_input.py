"""The messages of a chat: typed at a terminal, or read from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from motley.cli.report import say
from motley.errors import ConfigError

QUOTES = '"""'  # begins and ends a message of several lines
_PLAIN_TERMINALS = ("", "dumb", "unknown")  # values of TERM
_MAX_CHARS = 1 << 24  # of a message


def read_messages(words: Sequence[str]) -> Iterator[str]:
    """The messages that are not empty, until the end of input. `words` can be completed by Tab at a terminal.

    A message is one line. It continues after a trailing backslash, and between lines of three quotes. At a terminal,
    text that is pasted is one message, and Alt-Enter begins a new line.
    """
    if not sys.stdin.isatty():
        lines = _pipe()
    elif os.environ.get("TERM", "") in _PLAIN_TERMINALS:
        lines = _plain_terminal()
    else:
        lines = _terminal(words)
    for first in lines:
        parts = [first]
        while _is_open("\n".join(parts)):
            following = next(lines, None)
            if following is None:
                break
            parts.append(following)
        if message := clean("\n".join(parts)):
            yield message


def _is_open(text: str) -> bool:
    """Whether the message continues in the next line."""
    if text.lstrip().startswith(QUOTES):
        return text.count(QUOTES) < 2
    return text.endswith("\\") and not text.endswith("\\\\")


def clean(text: str) -> str:
    """The message without quotes around it, and without the backslashes that joined its lines."""
    text = text.strip()
    if text.startswith(QUOTES):
        return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text.replace("\\\n", "\n")


def _pipe() -> Iterator[str]:
    while line := sys.stdin.readline(_MAX_CHARS):
        if len(line) == _MAX_CHARS:
            raise ConfigError(
                f"a line of standard input has more than {_MAX_CHARS} characters", hint="is it a text file?"
            )
        yield line.rstrip("\r\n")


def _plain_terminal() -> Iterator[str]:
    """Lines of a terminal that understands no escape sequences, such as a shell in an editor."""
    lines = _pipe()
    while True:
        try:
            sys.stderr.write("> ")
            sys.stderr.flush()
            line = next(lines, None)
        except KeyboardInterrupt:
            say("\n/quit or Ctrl-D leaves.")
            lines = _pipe()  # the interrupt has ended the other one
            continue
        if line is None:
            say("")
            return
        yield line


def _terminal(words: Sequence[str]) -> Iterator[str]:
    session = _session(words)
    while True:
        try:
            yield session.prompt("> ")
        except EOFError:
            say("")  # the cursor is still beside the prompt
            return
        except KeyboardInterrupt:
            say("/quit or Ctrl-D leaves.")


def _session(words: Sequence[str]) -> Any:
    """A line editor with history, Tab completion of `words`, and messages of several lines."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if _is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    class Words(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterator[Any]:
            typed = document.text_before_cursor
            if typed.startswith("/"):
                yield from (Completion(word, -len(typed)) for word in words if word.startswith(typed))

    return PromptSession(
        multiline=True,
        key_bindings=keys,
        completer=Words(),
        complete_while_typing=False,
        prompt_continuation="  ",
        output=create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr),
    )
