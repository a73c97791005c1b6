"""An interactive chat: reads messages and commands, prints answers."""

from __future__ import annotations

import sys

import typer

from motley.cli.chat_commands import COMMANDS, ChatState, run_command
from motley.cli.chat_input import read_messages
from motley.cli.console import USER_ERROR, report, say
from motley.cli.conversation import Conversation
from motley.cli.figures import show_figures
from motley.errors import MotleyError

CHAT_TOKENS = 4096  # of one answer, unless -n says otherwise: a small model may never stop by itself


def chat(
    conversation: Conversation,
    *,
    opening: str | None = None,
    single_turn: bool = False,
    shows_statistics: bool = False,
) -> None:
    """Answers `opening`, then each message from standard input, until /quit or the end of input. Errors are shown; if a
    message from a pipe was not answered, the exit code is 2.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        if not conversation.is_chat:
            say("This model has no chat template: it continues what you type.")
        say("/help lists the commands.")
    state = ChatState(conversation, shows_statistics)
    are_answered = [] if opening is None else [_take_turn(state, opening)]
    for message in read_messages(list(COMMANDS)):
        text: str | None = message
        if message.startswith("//"):
            text = message[1:]
        elif message.startswith("/"):
            are_answered += _try(message, state)
            text, state.again = state.again, None
        if text is not None:
            are_answered.append(_take_turn(state, text))
        if state.has_ended or (single_turn and text is not None):
            break
    if not is_terminal and not all(are_answered):
        raise typer.Exit(USER_ERROR)


def _try(message: str, state: ChatState) -> list[bool]:
    """Runs a command. Returns [False] if it failed."""
    try:
        run_command(message, state)
    except MotleyError as error:
        report(error)
        return [False]
    return []


def _take_turn(state: ChatState, text: str) -> bool:
    """Prints the answer to `text`. Returns whether there was one."""
    conversation = state.conversation
    try:
        answer = conversation.print_answer(text)
    except MotleyError as error:  # for example, the message is longer than the context
        report(error)
        return False
    if answer.finish_reason == "length" and sys.stdin.isatty():
        say(f"note: the answer was cut after {answer.timings.new_tokens} tokens")
    if state.shows_statistics:
        show_figures(answer, conversation.llm.memory())
    return True
