"""Conversations with a model: one answer, or an interactive chat."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import typer

from motley.cli.console import USER_ERROR, report, say, show_figures
from motley.cli.streaming import print_stream
from motley.engine import Completion, SamplingParams
from motley.errors import ConfigError, MotleyError
from motley.llm import LLM
from motley.text.template import KEY as CHAT_TEMPLATE

CHAT_TOKENS = 4096  # of one answer, unless -n says otherwise: a small model may never stop by itself
HELP = """\
/help   this list
/clear  forget what was said
/quit   leave (or Ctrl-D)
Ctrl-C  stop the answer"""


class Conversation:
    """Sends text to a model: through its chat template, with the messages before it, or as text to continue."""

    def __init__(
        self, llm: LLM, params: SamplingParams, *, system: str | None = None, use_template: bool | None = None
    ) -> None:
        """`use_template` None: use a template if the model file has one; True: use a generic one if it has none."""
        self.is_chat = CHAT_TEMPLATE in llm.spec.metadata if use_template is None else use_template
        if system is not None and not self.is_chat:
            raise ConfigError("a system prompt needs a chat", hint="add -cnv, or put it into the text")
        self.llm = llm
        self.params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._said: list[dict[str, str]] = []

    def clear(self) -> None:
        self._said = []

    def answer(self, text: str) -> Completion:
        """The whole answer at once; it is not added to the conversation."""
        if self.is_chat:
            return self.llm.chat(self._with(text), params=self.params)
        return self.llm.generate(text, params=self.params)

    def print_answer(self, text: str) -> Completion:
        """Streams the answer to standard output, and adds `text` and the answer to the conversation."""
        if not self.is_chat:
            return print_stream(self.llm.stream(text, params=self.params))
        answer = print_stream(self.llm.stream_chat(self._with(text), params=self.params))
        self._said += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]
        return answer

    def _with(self, text: str) -> list[dict[str, str]]:
        return [*self._system, *self._said, {"role": "user", "content": text}]


def chat(conversation: Conversation, *, opening: str | None = None, single_turn: bool = False) -> None:
    """Answers `opening`, then each line of standard input, until /quit or the end of input. Errors are shown; if a line
    from a pipe was not answered, the exit code is 2.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _welcome(conversation)
    are_answered = [_take_turn(conversation, opening)] if opening is not None else []
    for line in _read_lines("> " if is_terminal else ""):
        if line == "/quit":
            break
        if line.startswith("/"):
            _obey(line, conversation)
            continue
        are_answered.append(_take_turn(conversation, line))
        if single_turn:
            break
    else:
        if is_terminal:
            say("")  # after Ctrl-D the cursor is still beside the prompt
    if not is_terminal and not all(are_answered):
        raise typer.Exit(USER_ERROR)


def _welcome(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):  # not on every platform
        import readline  # noqa: F401  line editing and history for input()
    if not conversation.is_chat:
        say("This model has no chat template: it continues what you type.")
    say("/help lists the commands.")


def _read_lines(prompt: str) -> Iterator[str]:
    """The lines that are not empty; Ctrl-C drops the line being typed."""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            say("\n/quit or Ctrl-D leaves.")
            continue
        if line:
            yield line


def _obey(command: str, conversation: Conversation) -> None:
    match command:
        case "/help":
            say(HELP)
        case "/clear":
            conversation.clear()
            say("Forgotten.")
        case _:
            say(f"There is no {command.split()[0]}.\n{HELP}")


def _take_turn(conversation: Conversation, text: str) -> bool:
    """Prints the answer to `text`. Returns whether there was one."""
    try:
        answer = conversation.print_answer(text)
    except MotleyError as error:  # for example, the context is full: the user can /clear it
        report(error)
        return False
    show_figures(answer, conversation.llm.memory())
    return True
