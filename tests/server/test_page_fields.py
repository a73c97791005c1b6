"""What the chat page sends is what the server reads. Needs no browser."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.resources import files

from motley.engine import SamplingParams
from motley.engine.drafting.choice import read_choice
from motley.server.api.description import _OPERATIONS

STATE = (files("motley.server") / "page" / "state.js").read_text()
SETTING = re.compile(r'number\("(\w+)"|\{ name: "(\w+)"([^}]*)')


def test_every_setting_that_is_sent_is_a_field_of_a_chat() -> None:
    found = [
        (number or name, rest)
        for number, name, rest in SETTING.findall(STATE[STATE.index("FIELDS = [") :].split("\n];")[0])
    ]
    sent = {name for name, rest in found if "local: true" not in rest}
    assert {"temperature", "samplers", "cache_salt"} < sent
    known = {field.name for field in fields(SamplingParams)} | set(_OPERATIONS["/v1/chat/completions"][2])
    assert sent <= known


def test_choices_of_speculation_are_possible() -> None:
    (choices,) = re.findall(r'name: "speculative".*choices: \[([^]]*)\]', STATE)
    names = [name for name in re.findall(r'"(\w*)"', choices) if name]
    assert [read_choice(name, ["grammar", "lookup"]) for name in names] == [("grammar", "lookup"), ()]
