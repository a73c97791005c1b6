"""`motley run` without a prompt: a chat over standard input."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

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
    assert "tokens/s" not in result.stderr
    assert chat_llm.params.max_tokens == 4096  # a small model may never stop by itself


def test_clear_forgets_all_but_the_system_prompt(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    motley("run", model, "-sys", "Be kind.", stdin="Hi\n/clear\nAgain\n")
    assert chat_llm.prompts[1] == [{"role": "system", "content": "Be kind."}, user("Again")]


def test_quit_leaves_at_once(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    result = motley("run", model, stdin="/quit\nHi\n")
    assert (result.exit_code, chat_llm.prompts) == (0, [])


def test_help_and_unknown_commands_list_the_commands(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    result = motley("run", model, stdin="/help\n/dance now\n")
    assert result.stderr.count("forget what was said") == 2
    assert "There is no /dance." in result.stderr
    assert chat_llm.prompts == []


def test_ctrl_c_stops_the_answer_and_not_the_chat(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    pending = [signal.SIGINT]
    chat_llm.before_piece = lambda index: signal.raise_signal(pending.pop()) if pending else None
    result = motley("run", model, stdin="Hi\nGo on\n")
    assert result.exit_code == 0
    assert result.stdout == "Hel\nHello.\n"
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


def test_a_message_may_have_several_lines(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    lines = 'one\\\ntwo\n"""\nthree\n\n  four\n"""\n"""five"""\n"""six\n'
    assert motley("run", model, stdin=lines).exit_code == 0
    said = [prompt[-1]["content"] for prompt in chat_llm.prompts]
    assert said == ["one\ntwo", "three\n\n  four", "five", "six"]


def test_two_slashes_begin_a_message_with_one(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    motley("run", model, stdin="//etc is a folder\n")
    assert chat_llm.prompts == [[user("/etc is a folder")]]


def test_commands_change_the_conversation(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    lines = "One\nTwo\n/undo\nThree\n/regen\n/system Be kind.\n/set temp 0.5\n/set top-k 7\n/set n -1\nFour\n"
    result = motley("run", model, stdin=lines)
    assert result.exit_code == 0, result.stderr
    one, three = [user("One"), assistant("Hello.")], [user("Three"), assistant("Hello.")]
    assert chat_llm.prompts[2] == chat_llm.prompts[3] == [*one, user("Three")]
    system = {"role": "system", "content": "Be kind."}
    assert chat_llm.prompts[4] == [system, *one, *three, user("Four")]
    params = chat_llm.params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/undo", "there is nothing to undo"),
        ("/regen", "there is no answer"),
        ("/set heat 3", "/set has no 'heat'"),
        ("/set temp hot", "/set temperature: 'hot' is not a number"),
        ("/set top-p 2", "/set top-p: "),
        ("/save", "there is no file name"),
        ("/save no/such/folder/x", "cannot write no/such/folder/x"),
        ("/load no-such-file", "cannot read no-such-file"),
        ("/load /dev/zero", "/dev/zero has more than"),
    ],
)
def test_a_command_that_cannot_be_is_an_error(
    motley: Motley, chat_llm: FakeLLM, model: str, line: str, message: str
) -> None:
    result = motley("run", model, stdin=f"{line}\n")
    assert result.exit_code == 2
    assert f"error: {message}" in result.stderr
    assert chat_llm.prompts == []


def test_help_with_words_is_about_them(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    result = motley("run", model, stdin="/help set\n/help with anything\n")
    assert result.stderr.count("/set [NAME VALUE]") == 2
    assert result.stderr.count("/undo") == 1


def test_statistics_come_on_request(motley: Motley, chat_llm: FakeLLM, model: str) -> None:
    result = motley("run", model, stdin="/stats\nHi\n/stats\n/stats on\nHo\n")
    assert "There is no answer yet." in result.stderr
    assert result.stderr.count("tokens/s | answer") == 2
    assert motley("run", model, "-v", stdin="Hi\n").stderr.count("tokens/s | answer") == 1


def test_a_conversation_is_saved_and_loaded(
    motley: Motley, chat_llm: FakeLLM, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    assert motley("run", model, "-sys", "Be kind.", stdin=f"Hi\n/save {file} cache\n").exit_code == 0
    assert len(chat_llm.saved["talk.json.cache"]) > len("Be kind.Hi")
    chat_llm.prompts.clear()
    assert motley("run", model, stdin=f"/load {file}\nMore\n").exit_code == 0
    system = {"role": "system", "content": "Be kind."}
    assert chat_llm.prompts == [
        "load talk.json.cache",
        [system, user("Hi"), assistant("Hello."), user("More")],
    ]
    file.write_text('{"motley_conversation": 1, "system": 3, "turns": []}')
    result = motley("run", model, stdin=f"/load {file}\n")
    assert "is not a saved conversation" in result.stderr


def test_the_oldest_turns_leave_whole_when_the_context_is_full(
    motley: Motley, chat_llm: FakeLLM, model: str
) -> None:
    chat_llm.n_ctx = 120
    lines = "".join(f"message {i}\n" for i in range(4))
    result = motley("run", model, "-sys", "Be kind.", stdin=lines)
    assert result.exit_code == 0, result.stderr
    assert "note: the context of 120 tokens is full: the oldest turn was dropped; the system" in result.stderr
    last = chat_llm.prompts[-1]
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user"]
    assert last[1] == user("message 2")


def test_an_endless_line_from_a_pipe_is_refused(
    motley: Motley, chat_llm: FakeLLM, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.cli.chat_input._MAX_CHARS", 100)
    result = motley("run", model, stdin="x" * 1000)
    assert result.exit_code == 2
    assert "error: a line of standard input has more than 100 characters" in result.stderr
