"""A chat in a pseudo-terminal, with the bundled model, as a user sees it."""

from __future__ import annotations

import pytest
from terminal import Terminal

ALT_ENTER = "\x1b\r"
PROMPT = r"\x1b\[\?2004h"  # the line editor asks for bracketed paste
PASTE = "\x1b[200~{}\x1b[201~"


def chat(*args: str) -> Terminal:
    terminal = Terminal("run", "-t", "1", "-c", "512", "--temp", "0", *args, PROMPT_TOOLKIT_NO_CPR="1")
    terminal.expect("/help lists the commands.")
    terminal.expect(PROMPT)
    return terminal


def test_a_chat_with_several_lines_commands_and_completion() -> None:
    with chat("-n", "8") as terminal:
        terminal.type(PASTE.format("Hello there.\nHow are you?"))
        terminal.expect("How are you")
        terminal.type("\r")
        terminal.expect(PROMPT)  # one answer for both lines
        terminal.type(f"A line{ALT_ENTER}and another\r")
        terminal.expect(PROMPT)
        terminal.type("/st\t")
        terminal.expect("ats")  # the editor may draw "/st" before and only the rest now
        terminal.type("\r")
        terminal.expect(r"answer: \d+ tokens")
        terminal.expect(PROMPT)
        terminal.type("/help me with everything\r")
        terminal.expect("/regen")
        terminal.expect(PROMPT)
        terminal.type("/save /dev/null\r")
        terminal.expect("Saved 2 turns")
        terminal.expect(PROMPT)
        terminal.type("\x04")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text
        assert terminal.text.count("tokens/s") == 2  # both in one line, after /stats


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_drops_a_line() -> None:
    with chat("--ignore-eos", "-n", "-1", "--context-shift") as terminal:
        terminal.type("Tell me a story.\r")
        terminal.expect(r"(\w+ ){8}")
        terminal.type("\x03")
        terminal.expect(PROMPT)
        terminal.type("half a li\x03")
        terminal.expect("/quit or Ctrl-D leaves.")
        terminal.expect(PROMPT)
        terminal.type("/quit\r")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text


def test_a_chat_longer_than_its_context_goes_on() -> None:
    args = ("-n", "24", "--ignore-eos", "-c", "160")
    with chat(*args) as terminal:
        for _ in range(5):
            terminal.type("Tell me more about the little fox and the red kite.\r")
            terminal.expect(PROMPT)
        terminal.type("/quit\r")
        assert terminal.wait() == 0
    assert "note: the context of 160 tokens is full" in terminal.text
    assert "error:" not in terminal.text
