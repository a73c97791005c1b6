from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.errors import RequestError
from motley.text import StopChecker

texts = st.text(alphabet="ab", max_size=20)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def until_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition, character by character."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(st.lists(texts, max_size=6), stop_lists)
def test_the_outcome_depends_on_the_text_and_not_on_its_pieces(pieces: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown, stopped = "", False
    expected = until_stop("".join(pieces), stops)
    for piece in pieces:
        text, stopped = checker.push(piece)
        shown += text
        assert expected[0].startswith(shown)
    assert (shown + checker.flush(), stopped) == expected


@given(texts, stop_lists)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown, stopped = checker.push(text)
    held = checker.flush()
    if not stopped:
        assert shown + held == text
        assert not held or any(stop.startswith(held) for stop in stops)


def test_nothing_is_shown_after_a_stop() -> None:
    checker = StopChecker(["\nUser:"])
    assert checker.push("Hi\nUs") == ("Hi", False)
    assert checker.push("er: and") == ("", True)
    assert checker.push("more") == ("", True)
    assert checker.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopChecker(["", "x"])
