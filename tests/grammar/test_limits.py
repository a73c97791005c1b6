"""What may be compiled: sizes, nesting, repetitions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from motley.errors import RequestError
from motley.grammar import Constraint, check_constraint, read_constraint


def nested_schema(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def chain_of_rules(n: int) -> str:
    return "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(n)) + f'a{n}: "x"\n'


def chain_of_references(n: int) -> dict[str, Any]:
    links = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(n)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{n}": {"type": "string"}}}


TOO_LARGE: list[dict[str, Any]] = [
    {"json_schema": nested_schema(70)},
    {"json_schema": nested_schema(60_000)},
    {"json_schema": chain_of_references(600)},
    {"json_schema": {"enum": ["x" * 10] * 30_000}},
    {"json_schema": {"type": "array", "minItems": 10**9}},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 10**9}}}},
    {"json_schema": {"type": "string", "pattern": "(a{1000}){1000}"}},
    {"json_schema": {"type": "string", "description": "x" * 300_000}},
    {"grammar": chain_of_rules(20_000)},
    {"grammar": "\n".join(f'root{i} ::= "a"' for i in range(3000))},
    {"grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000},
    {"grammar": 'start: "a"{1000000}'},
    {"grammar": 'start: "a"{99999999999999999999999}'},
    {"grammar": "start: /(a{1000}){1000}/"},
    {"grammar": 'start: %json {"type": "array", "minItems": 1000000000}'},
    {"grammar": json.dumps({"grammars": [{"lark_grammar": chain_of_rules(20_000)}]})},
    {"regex": "(" * 60_000 + "a" + ")" * 60_000},
    {"regex": "((a{100}){100}){100}"},
    {"regex": "a" * 300_000},
]


@pytest.mark.parametrize("options", TOO_LARGE, ids=lambda options: str(options)[:40])
def test_what_is_too_large_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"too large|JSON"):
        read_constraint(**options)


MALFORMED: list[dict[str, Any]] = [
    {"json_schema": "{"},
    {"json_schema": "[1]"},
    {"json_schema": {"type": "nonsense"}},
    {"json_schema": {"$ref": "#/missing"}},
    {"json_schema": {"not": {"type": "string"}}},
    {"json_schema": {"a": object()}},
    {"grammar": ""},
    {"grammar": "root ::= missing"},
    {"grammar": 'other ::= "a"'},
    {"grammar": 'start: "a'},
    {"grammar": "start: %json {"},
    {"grammar": '{"grammars": 3}'},
    {"regex": "("},
    {"regex": "a(?=b)"},
    {"regex": "a", "grammar": 'root ::= "a"'},
    {"json_object": True, "regex": "a"},
    {"grammar_triggers": ("a",)},
    {"grammar": 'root ::= "a"', "grammar_triggers": ("a",) * 20},
]


@pytest.mark.parametrize("options", MALFORMED, ids=lambda options: str(options)[:40])
def test_what_is_malformed_is_refused_without_a_vocabulary(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        check_constraint(read_constraint(**options) or Constraint(""))


GOOD: list[dict[str, Any]] = [
    {"json_schema": nested_schema(20)},
    {"json_schema": chain_of_references(400)},
    {"json_schema": {"type": "string", "format": "password"}},  # a format that informs the reader
    {"json_schema": {"type": "object", "properties": {"format": {"const": {"format": "x"}}}}},
    {"json_schema": True},
    {"grammar": chain_of_rules(1900)},
    {"grammar": 'root ::= item+ # a comment with "quotes"\nitem ::= "- " [^\\n/"]+ "\\n"'},
    {"grammar": 'start ::= "no"\nroot ::= start'},
    {"grammar": "start: " + " ".join('"("' for _ in range(200))},
    {"grammar": 'start: <|special|> "a"'},  # the vocabulary decides
    {"regex": r"[\]{(]{3}\({2}(ab|c){1,40}"},
    {"json_object": True, "json_schema": {"type": "object"}},
]


@pytest.mark.parametrize("options", GOOD, ids=lambda options: str(options)[:40])
def test_what_is_within_the_limits_is_accepted(options: dict[str, Any]) -> None:
    constraint = read_constraint(**options)
    assert constraint is not None
    check_constraint(constraint)


def test_no_option_is_no_constraint() -> None:
    assert read_constraint() is None


def test_values_keep_what_looks_like_a_format() -> None:
    constraint = read_constraint(json_schema={"const": {"format": "x"}, "format": "x"})
    assert constraint is not None
    assert json.loads(constraint.source)["grammars"][0]["json_schema"]["const"] == {"format": "x"}
    assert "format" not in json.loads(constraint.source)["grammars"][0]["json_schema"]


HOSTILE: list[dict[str, Any]] = [  # each would take minutes or hours if reading it were not linear
    {"grammar": "start: /" + "[a]" * 40_000 + "\n"},
    {"grammar": "start: " + "/[" * 100_000},
    {"grammar": "root ::= " + "[" * 200_000},
    {"grammar": "\n" * 200_000 + "x"},
    {"grammar": "start: " + " " * 200_000 + "x"},
    {"grammar": "start: a{" + " " * 200_000},
    {"grammar": "a" * 200_000},
    {"grammar": 'start: "' + "\\" * 200_000},
    {"grammar": "<" * 200_000},
    {"grammar": "start: " + "%json {" * 30_000},
    {"regex": "a{" + " " * 200_000},
    {"regex": "[" * 200_000},
    {"json_schema": {"minItems": 10**400}},
    {"regex": "\udcff"},
    {"grammar": "start: /\udcff/"},
]


@pytest.mark.parametrize("options", HOSTILE, ids=lambda options: str(options)[:40])
def test_hostile_text_is_refused_in_linear_time(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        check_constraint(read_constraint(**options) or Constraint(""))
