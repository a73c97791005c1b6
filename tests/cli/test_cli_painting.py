"""How answers are written to a terminal: thoughts dimmed, Markdown rendered, control characters escaped."""

from __future__ import annotations

import io
import sys

import pytest

from motley.cli.painting import MarkdownPainter, PlainPainter, ThoughtPainter, make_painter


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A standard output that says that it is a terminal."""
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    return out


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_thought_is_dim_however_it_is_cut_into_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    screen = terminal(monkeypatch)
    text = "Well <think>a < b\nhm</think>\nYes <thin"
    painter = ThoughtPainter()
    for start in range(0, len(text), size):
        painter.write(text[start : start + size])
    painter.finish()
    assert screen.getvalue() == "Well \x1b[2m<think>a < b\nhm</think>\x1b[22m\nYes <thin\n"


def test_a_template_may_have_opened_the_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    painter = make_painter(starts_in_thought=True)
    painter.write("hm</think> Yes")
    painter.finish()
    assert screen.getvalue() == "\x1b[2mhm</think>\x1b[22m Yes\n"


def test_control_characters_of_an_answer_are_shown_and_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    painter = make_painter()
    painter.write("a\x1b]0;title\x07b\tc\u200dd\n")
    painter.finish()
    assert screen.getvalue() == "a\\x1b]0;title\\x07b\tc\u200dd\n"


def test_markdown_is_rendered_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    painter = make_painter(renders_markdown=True)
    assert isinstance(painter, MarkdownPainter)
    painter.write("Some **bold** text\n\n```python\nx = 1\n\ny = 2\n")
    first = screen.getvalue()
    assert "bold" in first
    assert "**" not in first
    assert "y = 2" not in first
    painter.write("```\n- one")
    painter.finish()
    assert "```" not in screen.getvalue()
    assert "one" in screen.getvalue()


def test_a_pipe_gets_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    painter = make_painter(renders_markdown=True)
    assert isinstance(painter, PlainPainter)
    painter.write("**a** <think>\x1b")
    painter.finish()
    assert out.getvalue() == "**a** <think>\x1b\n"
