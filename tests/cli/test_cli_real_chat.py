"""The chat with the bundled model, through the real command: what fakes cannot show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import Terminal
from test_cli_terminal import PROMPT, chat

from motley.bundled import bundled_model_path
from motley.gguf import read_spec
from motley.text import Tokenizer

QUICK = ("-t", "1", "-c", "512", "--temp", "0", "-n", "8")


def talk(*lines: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A process that reads these lines from a pipe."""
    command = [sys.executable, "-m", "motley", "run", *QUICK, *flags]
    text = "".join(f"{line}\n" for line in lines)
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in result.stderr
    return result


def test_a_terminal_takes_quotes_backslashes_and_slashes(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with chat("-n", "2") as terminal:
        for message in ('"""one\r\rtwo"""\r', "three\\\rfour\r", "//five\r", f"/save {file}\r"):
            terminal.type(message)
            terminal.expect(PROMPT)
        terminal.type("/quit\r")
        assert terminal.wait() == 0
    turns = json.loads(file.read_text())["turns"]
    assert [turn["text"] for turn in turns] == ["one\n\ntwo", "three\nfour", "/five"]


@pytest.mark.slow
def test_a_conversation_goes_on_in_another_process_with_its_cache(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    first = talk("Tell me a story about a fox who lives in a big forest.", "And then?", f"/save {file} cache")
    assert first.returncode == 0, first.stderr
    assert "Saved 2 turns" in first.stderr
    assert (tmp_path / "talk.json.cache").stat().st_size > 1000
    second = talk(f"/load {file}", "And then?", "/stats")
    assert second.returncode == 0, second.stderr
    assert "Loaded 2 turns" in second.stderr
    assert " and its cache." in second.stderr
    assert " cached), " in second.stderr  # of the prompt's tokens
    (tmp_path / "talk.json.cache").unlink()
    assert talk(f"/load {file}", "And then?").stdout == second.stdout  # the cache changes no answer


@pytest.mark.slow
def test_commands_act_on_a_real_conversation() -> None:
    plain = talk("Hello.")
    changed = talk("Hello.", "/regen", "/undo", "/set temp 0", "Hello.", "/clear", "Hello.")
    assert changed.stdout == plain.stdout * 4  # the same question with the same past, greedily
    assert talk("Hello.", flags=("-sys", "Be kind.")).stdout == talk("/system Be kind.", "Hello.").stdout


def test_context_shift_goes_on_where_the_context_ends() -> None:
    flags = ("-c", "128", "-n", "200", "--ignore-eos", "--context-shift")
    result = talk("Tell me a story.", "/stats", flags=flags)
    assert result.returncode == 0, result.stderr
    assert "answer: 200 tokens" in result.stderr


def test_a_thought_is_dim_on_a_terminal(tmp_path: Path) -> None:
    template = tmp_path / "thinks.jinja"
    template.write_text("{{ messages[0].content }}<think>")
    flags = ("--chat-template-file", str(template), "-p", "Once upon a time", "--ignore-eos")
    with Terminal("run", *QUICK, *flags) as terminal:
        assert terminal.wait() == 0
        answer = terminal.seen.split("loaded ")[1].split("\n", 1)[1]
    assert answer.startswith("\x1b[2m")
    assert "\x1b[22m" in answer


def test_markdown_is_rendered_on_request_only() -> None:
    tokenizer = Tokenizer.from_spec(read_spec(bundled_model_path()))
    dash = tokenizer.encode("-", add_special=False)[-1]  # an answer of dashes is a line in Markdown
    flags = ("-p", "x", "--ignore-eos", "-l", f"{dash}+1000")
    with Terminal("run", *QUICK, *flags, "--markdown") as terminal:
        assert terminal.wait() == 0
        assert "-" * 80 in terminal.text
    with Terminal("run", *QUICK, *flags) as terminal:
        assert terminal.wait() == 0
        assert "-" * 8 in terminal.text
        assert "-" * 80 not in terminal.text


def test_a_terminal_without_escapes_gets_none() -> None:
    with Terminal("run", *QUICK, TERM="dumb") as terminal:
        terminal.expect("/help lists the commands.")
        terminal.expect("> ")
        terminal.type("half a li\x03")
        terminal.expect("/quit or Ctrl-D leaves.")
        terminal.expect("> ")
        terminal.type("Hello\r")
        terminal.expect(r"\w[^>]*\n> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text
        assert "\x1b" not in terminal.seen
