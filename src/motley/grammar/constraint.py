"""The constraint of an answer, from a request's options, checked as far as that needs no vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from motley.errors import ConfigError, RequestError
from motley.grammar.lark import with_schemas
from motley.grammar.limits import check_grammar, check_regex, check_schema, check_size

# At most one space or one line break with indentation: a model cannot generate white space without end.
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,40})?"}
# Formats that the grammar enforces. JSON Schema lets a validator ignore formats that it does not know.
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_VALUES = ("const", "enum", "default", "examples")  # keywords that hold values, not schemas
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_START = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\]){0,500}\]|#[^\n]*|(?<![\w-])start(?![\w-])')
_MAX_TRIGGERS, _MAX_TRIGGER = 16, 128  # strings; characters of one


@dataclass(frozen=True)
class Constraint:
    """A grammar in llguidance's own form. With `triggers`, the answer is free until one of them has been generated; the
    grammar begins with the trigger and holds from there on.
    """

    source: str
    triggers: tuple[str, ...] = ()


def read_constraint(
    *,
    json_schema: Mapping[str, Any] | bool | str | None = None,
    json_object: bool = False,
    grammar: str | None = None,
    regex: str | None = None,
    grammar_triggers: tuple[str, ...] = (),
) -> Constraint | None:
    """The constraint of a request's options; None if there is none. RequestError for what is malformed or too large."""
    given = {"json_schema": json_schema, "grammar": grammar, "regex": regex}
    names = [name for name, value in given.items() if value is not None] + ["json_object"] * json_object
    if json_object and json_schema is not None:
        names.remove("json_object")  # "an object that matches this schema"
    if len(names) > 1:
        raise RequestError(f"an answer cannot have both {names[0]} and {names[1]}", hint="give one of them")
    _check_triggers(grammar_triggers, grammar)
    if grammar is not None:
        return Constraint(_from_grammar(grammar), tuple(dict.fromkeys(grammar_triggers)))
    if regex is not None:
        return Constraint(_from_regex(regex))
    if json_schema is not None:
        return Constraint(_from_schema(json_schema))
    return Constraint(_from_schema({"type": "object"})) if json_object else None


def _check_triggers(triggers: tuple[str, ...], grammar: str | None) -> None:
    if triggers and grammar is None:
        raise RequestError(
            "grammar_triggers need a grammar", hint="give grammar=…, which begins with a trigger"
        )
    if len(triggers) > _MAX_TRIGGERS or any(len(trigger) > _MAX_TRIGGER for trigger in triggers):
        raise RequestError(
            "grammar_triggers are too large",
            hint=f"at most {_MAX_TRIGGERS}, of {_MAX_TRIGGER} characters each",
        )


def _from_schema(schema: Mapping[str, Any] | bool | str) -> str:
    if not isinstance(schema, str):
        try:
            schema = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"json_schema is not JSON: {str(error)[:200]}") from None
    check_size("json_schema", schema)
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict | bool):
        raise RequestError(
            f"json_schema is {schema[:60]}", hint="it must be an object, such as {'type': 'object'}"
        )
    source: str = llguidance_package().LLMatcher.grammar_from_json_schema(json.dumps(_prepared(value)))
    return source


def _prepared(schema: Any) -> Any:
    """A schema within limits, without formats that only inform the reader, and with our white space."""
    check_schema(schema)
    if not isinstance(schema, dict):
        return schema
    return {"x-guidance": _JSON_OPTIONS} | _without_unknown_formats(schema)


def _without_unknown_formats(value: Any) -> Any:
    """The schema without formats that only inform the reader. Its depth has been checked."""
    if isinstance(value, list):
        return [_without_unknown_formats(child) for child in value]
    if not isinstance(value, dict):
        return value
    is_unknown = isinstance(kind := value.get("format"), str) and kind not in _FORMATS
    return {
        key: child if key in _VALUES else _without_unknown_formats(child)
        for key, child in value.items()
        if not (key == "format" and is_unknown)
    }


def _from_grammar(text: str) -> str:
    """Lark, GBNF (llama.cpp's notation), or llguidance's JSON of several grammars."""
    check_size("grammar", text)
    if not text.strip():
        raise RequestError(
            "grammar is empty", hint="give a grammar with the rule root (GBNF) or start (Lark)"
        )
    if text.lstrip().startswith("{"):
        return _from_many(text)
    check_grammar(text)
    return _from_gbnf(text) if _GBNF.search(text) else with_schemas(text, _prepared)


def _from_gbnf(text: str) -> str:
    llguidance_package()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    # The converter calls the rule "root" "start", so a rule of that name gets another one.
    text = _GBNF_START.sub(lambda match: "start-rule" if match[0] == "start" else match[0], text)
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise RequestError("grammar is nested too deeply") from None
    except Exception as error:  # the converter raises plain exceptions
        raise RequestError(f"grammar: {shortened(str(error))}", hint="it was read as GBNF") from None


def _from_many(text: str) -> str:
    try:
        whole = json.loads(text)
        for each in whole["grammars"]:
            if isinstance(lark := each.get("lark_grammar"), str):
                check_grammar(lark)
                each["lark_grammar"] = with_schemas(lark, _prepared)
            if "json_schema" in each:
                each["json_schema"] = _prepared(each["json_schema"])
        return json.dumps(whole)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise RequestError(
            "grammar begins with { but is not llguidance's JSON", hint="give GBNF or Lark"
        ) from None


def _from_regex(pattern: str) -> str:
    check_size("regex", pattern)
    check_regex("regex", pattern)
    source: str = llguidance_package().LLMatcher.grammar_from_regex(pattern)
    return source


def shortened(message: str) -> str:
    """An error message of llguidance as one line."""
    line = " ".join(message.split("<state>")[0].split())
    return line if len(line) <= 300 else f"{line[:299]}…"


def llguidance_package() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "constrained answers need the package llguidance", hint="pip install 'motley-llm[grammar]'"
        ) from None
    return llguidance
