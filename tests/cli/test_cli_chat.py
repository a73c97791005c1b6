"""`motley run` without a prompt: a chat over standard input."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from fake_llm import CHAT_SPEC, FakeLLM
from typer.testing import Result

from motley.errors import RequestError

Motley = Callable[..., Result]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def chat_llm(llm: FakeLLM) -> FakeLLM:
    llm.spec = CHAT_SPEC
    llm.pieces = ("Hel", "lo.")
    return llm


def test_each_turn_carries_what_was_said_before(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    result = motley("run", model, stdin="Hi\n\nAnd you?\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello.\nHello.\n"
    assert chat_llm.prompts == [[user("Hi")], [user("Hi"), assistant("Hello."), user("And you?")]]
    assert result.stderr.count("tokens/s | answer") == 2


def test_clear_forgets_all_but_the_system_prompt(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    motley("run", model, "-sys", "Be kind.", stdin="Hi\n/clear\nAgain\n")
    assert chat_llm.prompts[1] == [{"role": "system", "content": "Be kind."}, user("Again")]


def test_quit_leaves_at_once(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    result = motley("run", model, stdin="/quit\nHi\n")
    assert (result.exit_code, chat_llm.prompts) == (0, [])


def test_help_and_unknown_commands_list_the_commands(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    result = motley("run", model, stdin="/help\n/dance now\n")
    assert result.stderr.count("/clear  forget what was said") == 2
    assert "There is no /dance." in result.stderr
    assert chat_llm.prompts == []


def test_ctrl_c_stops_the_answer_and_not_the_chat(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    pending = [signal.SIGINT]
    chat_llm.before_piece = lambda index: signal.raise_signal(pending.pop()) if pending else None
    result = motley("run", model, stdin="Hi\nGo on\n")
    assert result.exit_code == 0
    assert result.stdout == "Hel\nHello.\n"
    assert "4 tokens (stopped)" in result.stderr
    assert chat_llm.prompts[1] == [user("Hi"), assistant("Hel"), user("Go on")]


def test_an_error_in_one_turn_does_not_end_the_chat(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    chat_llm.error = RequestError("the context is full", hint="/clear")
    result = motley("run", model, stdin="Hi\nStill there?\n")
    assert result.exit_code == 2  # whoever wrote into the pipe does not read standard error
    assert "error: the context is full" in result.stderr
    assert chat_llm.prompts[1] == [user("Still there?")]  # what got no answer was not said


def test_a_prompt_with_cnv_opens_the_chat(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    motley("run", model, "-cnv", "-p", "Hi", stdin="More\n")
    assert chat_llm.prompts[-1] == [user("Hi"), assistant("Hello."), user("More")]


def test_single_turn_leaves_after_one_answer(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    result = motley("run", model, "-st", stdin="/help\nHi\nMore\n")
    assert (result.stdout, len(chat_llm.prompts)) == ("Hello.\n", 1)


def test_cnv_chats_without_a_template_too(motley: Motley, llm: FakeLLM, model: str) -> None:
    motley("run", model, "-cnv", "-sys", "Be kind.", stdin="Hi\n")
    assert llm.prompts == [[{"role": "system", "content": "Be kind."}, user("Hi")]]


def test_a_prompt_that_looks_like_a_command_is_a_prompt(
    motley: Motley, chat_llm: FakeLLM, model: str
) -> None:
    motley("run", model, "-cnv", "-p", "/quit")
    assert chat_llm.prompts == [[user("/quit")]]


def test_without_a_template_each_line_is_continued(motley: Motley, llm: FakeLLM, model: str) -> None:
    motley("run", model, stdin="Once\nTwice\n")
    assert llm.prompts == ["Once", "Twice"]


def test_ctrl_c_at_the_prompt_drops_the_line(
    motley: Motley, chat_llm: FakeLLM, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str | type[BaseException]] = [KeyboardInterrupt, "Hi", EOFError]

    def read(_prompt: str) -> str:
        line = lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    result = motley("run", model)
    assert result.exit_code == 0
    assert "/quit or Ctrl-D leaves." in result.stderr
    assert chat_llm.prompts == [[user("Hi")]]
