"""Grammars that make calls valid: Lark for llguidance, from a format's markers and the tools' JSON schemas.

`required` and named choices are enforced from the first token (after reasoning). `auto` is enforced from the marker on:
text is free until the model begins a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from motley.text.tools.format import KEY, NUMBER, Style, ToolFormat
from motley.text.tools.own_syntax import QUOTE
from motley.text.tools.schema import enforceable, types_of

MAX_TRIGGERS = 16
MAX_AUTO = 150_000  # characters of a grammar that the request does not demand
MAX_CALLS = 32  # of one answer: a small model may find no end
_ANY = "/(.|\\n)*/"
# Tags that may be control tokens of the vocabulary.
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]|\x01")
# JSON without white space of the model's choice; keywords that llguidance does not know are ignored.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
    "lenient": True,
}


@dataclass(frozen=True)
class Choice:
    """`name`: the function that must be called, of the kind "named"."""

    kind: Literal["auto", "none", "required", "named"]
    name: str | None = None


@dataclass(frozen=True)
class GrammarRequest:
    """tools: the JSON schema of each tool's arguments, by name. is_reasoning: the prompt has opened the reasoning."""

    form: ToolFormat
    tools: Mapping[str, Mapping[str, Any]]
    choice: Choice
    is_parallel: bool = True
    is_reasoning: bool = False
    may_reason: bool = True
    special_id: Callable[[str], int | None] = lambda text: None


def make_grammar(request: GrammarRequest) -> tuple[str | None, tuple[str, ...]]:
    """The grammar and the strings that start it; none of them: it holds from the beginning."""
    if request.choice.kind == "none" or not request.tools:
        return None, ()
    tools = {name: enforceable(schema) for name, schema in request.tools.items()}
    grammar, triggers = _Writer(replace(request, tools=tools)).grammar()
    if request.choice.kind == "auto" and len(grammar) > MAX_AUTO:
        return None, ()  # hundreds of tools: better a call that may be wrong than none
    return grammar, triggers


@dataclass
class _Writer:
    request: GrammarRequest
    rules: list[str] = field(default_factory=list)
    n_rules: int = 0

    def grammar(self) -> tuple[str, tuple[str, ...]]:
        form, choice = self.request.form, self.request.choice
        if form.style is Style.GENERIC:
            return self._whole(self._generic()), ()
        calls = self._calls()
        if choice.kind == "auto" and form.primer:  # the prompt has the marker: content has one of its own
            content = self.literal(form.content_start.removeprefix(form.primer))
            return self._text(f"{self._rule(calls)} | {content} {self._rule(_ANY)}"), ()
        if choice.kind == "auto":
            return self._text(calls), self._triggers()
        return self._whole(calls), ()

    def _triggers(self) -> tuple[str, ...]:
        """Texts that begin a call and that no ordinary text contains."""
        form = self.request.form
        if form.trigger.startswith(("<", "[", "]")) or form.style is Style.HARMONY:
            return (form.trigger,)
        if form.trigger:
            return (form.opening.strip(),)
        starts = [
            f'{{"{form.json.name_key}": {json.dumps(name, ensure_ascii=False)}' for name in self.request.tools
        ]
        return tuple(starts) if len(starts) <= MAX_TRIGGERS else (f'{{"{form.json.name_key}": "',)

    def _whole(self, body: str) -> str:
        """The grammar with the reasoning that may or must come before."""
        form, reasoning = self.request.form, self.request.form.reasoning
        if form.style is Style.HARMONY:
            text = self._until("<|end|>")
            begin = self.literal("<|channel|>analysis<|message|>")
            return self._text(f"({begin} {text} {self.literal('<|start|>assistant')})? {body}")
        if reasoning is None or not (self.request.is_reasoning or self.request.may_reason):
            return self._text(body)
        thought = self._until(reasoning.end.strip()) + " /[ \\n]{0,4}/"
        if self.request.is_reasoning:
            return self._text(f"{thought} {body}")
        return self._text(f"({self.literal(reasoning.start)} {thought})? {body}")

    def _text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self.rules]) + "\n"

    def _rule(self, body: str, attributes: str = "") -> str:
        self.n_rules += 1
        name = f"r{self.n_rules}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        """A text; control tokens in it by their ids."""
        parts, at = [], 0
        for found in _TAG.finditer(text):
            token = None if found[0] == NUMBER else self.request.special_id(found[0])
            if token is None and found[0] != NUMBER:
                continue
            parts.append(_quoted(text[at : found.start()]))
            parts.append("/[0-9]{1,3}/" if token is None else f"<[{token}]>")
            at = found.end()
        parts.append(_quoted(text[at:]))
        return " ".join(part for part in parts if part) or '""'

    def _until(self, end: str) -> str:
        """Any text up to the end, which is part of it."""
        token = self.request.special_id(end)
        if token is not None:
            return f"{self._rule(_ANY)} <[{token}]>"
        return self._rule(_ANY, f"[suffix={json.dumps(end)}]")

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._rule("%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS}))

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Arguments are an object, whatever the schema leaves open."""
        return self._json(schema if schema.get("type") == "object" else {**schema, "type": "object"})

    def _calls(self) -> str:
        form = self.request.form
        names = [self.request.choice.name] if self.request.choice.name else list(self.request.tools)
        call = self._rule(" | ".join(self._rule(self._call(name)) for name in names))
        more = ""
        if self.request.is_parallel and form.is_parallel:
            separator = self.literal(form.separator + form.call_start)
            more = f" ({separator} {call} {self.literal(form.call_end)}){{0,{MAX_CALLS - 1}}}"
        opening = form.opening.removeprefix(form.primer)
        return f"{self.literal(opening)} {call} {self.literal(form.call_end)}{more} {self.literal(form.section_end)}"

    def _call(self, name: str) -> str:
        form, schema = self.request.form, self.request.tools[name]
        match form.style:
            case Style.NAMED_JSON:
                ends = [self.literal(end) for end in form.named.name_end]
                known = (
                    ""
                    if form.named.id_start is None
                    else "/[a-zA-Z0-9]{9}/ " + self.literal(form.named.id_start)
                )
                return (
                    f"{known} {self.literal(name)} {' /[a-zA-Z0-9]{1,9}/ '.join(ends)} {self._object(schema)}"
                )
            case Style.TAGGED:
                return self._tagged(name, schema)
            case Style.PYTHON:
                items = self._listed(schema, lambda key, value: self._python_item(key, value, schema))
                return f'{self.literal(name + "(")} {items} ")"'
            case Style.GEMMA:
                return f'{self.literal(name + "{")} {self._listed(schema, self._gemma_item, ",")} "}}"'
            case Style.HARMONY:
                return self._harmony(name, schema)
            case _:
                return self._json_call(name, schema)

    def _json_call(self, name: str, schema: Mapping[str, Any]) -> str:
        form = self.request.form.json
        if form.is_keyed_by_name:
            return f'{self.literal("{" + json.dumps(name) + ": ")} {self._object(schema)} "}}"'
        pairs = f'"{form.name_key}": {json.dumps(name, ensure_ascii=False)}, "{form.arguments_key}": '
        if form.id_key is None:
            return f'{self.literal("{" + pairs)} {self._object(schema)} "}}"'
        start = self.literal(f'"{form.id_key}": "')
        if form.is_id_first:
            return f'"{{" {start} /[0-9]{{1,3}}/ {self.literal(chr(34) + ", " + pairs)} {self._object(schema)} "}}"'
        end = f'", " {start} /[a-zA-Z0-9]{{9}}/ {_quoted(chr(34) + "}")}'
        return f"{self.literal('{' + pairs)} {self._object(schema)} {end}"

    def _tagged(self, name: str, schema: Mapping[str, Any]) -> str:
        form = self.request.form.tagged
        assert form is not None

        def item(key: str, value: Mapping[str, Any]) -> str:
            types = types_of(value, schema)
            is_text = types == {"string"}
            start = self.literal(form.key_start + key + (form.value_start if is_text else form.json_start))
            end = form.value_end.replace(KEY, key)
            if is_text and "enum" not in value and "const" not in value:
                return f"{start} {self._until(end.strip())}"
            return f"{start} {self._value(value, schema, is_text)} {self.literal(end)}"

        return f"{self.literal(name + form.name_end)} {self._listed(schema, item, form.separator)}"

    def _value(self, value: Mapping[str, Any], root: Mapping[str, Any], is_text: bool) -> str:
        """A value as JSON; as raw text where it is one of some texts."""
        if is_text:
            options = value["enum"] if "enum" in value else [value["const"]]
            return "(" + " | ".join(self.literal(str(option)) for option in options) + ")"
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return self._json({**definitions, **value})

    def _listed(
        self,
        schema: Mapping[str, Any],
        item: Callable[[str, Mapping[str, Any]], str],
        separator: str = ", ",
    ) -> str:
        """Properties in their order; those that are not required may be left out."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        needed = [key for key in properties if isinstance(required, list) and key in required]
        optional = [key for key in properties if key not in needed]
        items = {
            key: item(key, properties[key] if isinstance(properties[key], Mapping) else {})
            for key in properties
        }
        if not separator.strip():
            glue = self.literal(separator) if separator else ""
            parts = [items[key] for key in needed] + [f"({items[key]})?" for key in optional]
            return f" {glue} ".join(parts) or '""'
        glue = self.literal(separator)
        if needed:
            first = f" {glue} ".join(items[key] for key in needed)
            return first + "".join(f" ({glue} {items[key]})?" for key in optional)
        if not optional:
            return '""'
        # The first of the optional ones that is there has no separator before it.
        chains = [
            items[key] + "".join(f" ({glue} {items[later]})?" for later in optional[i + 1 :])
            for i, key in enumerate(optional)
        ]
        return "(" + " | ".join(self._rule(chain) for chain in chains) + ")?"

    def _python_item(self, key: str, value: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        return f"{self.literal(key + '=')} {self._value(value, root, is_text=False)}"

    def _gemma_item(self, key: str, value: Mapping[str, Any]) -> str:
        return f"{self.literal(key + ':')} {self._gemma_value(value, 0)}"

    def _gemma_value(self, schema: Mapping[str, Any], depth: int) -> str:
        types = types_of(schema, {})
        quote = self.literal(QUOTE)
        if types == {"string"}:
            if isinstance(options := schema.get("enum"), list):
                return f"{quote} {self._value(schema, {}, True)} {quote}" if options else '""'
            return f"{quote} {self._until(QUOTE)}"
        if types == {"object"} and depth < 8 and isinstance(schema.get("properties"), Mapping):
            nested = self._listed(
                schema, lambda k, v: f"{self.literal(k + ':')} {self._gemma_value(v, depth + 1)}", ","
            )
            return self._rule(f'"{{" {nested} "}}"')
        if types == {"array"} and depth < 8 and isinstance(schema.get("items"), Mapping):
            element = self._gemma_value(schema["items"], depth + 1)
            return self._rule(f'"[" ({element} ("," {element})*)? "]"')
        if types & {"string", "object", "array"}:
            return f"({quote} {self._until(QUOTE)} | {self._json({'type': ['number', 'boolean', 'null']})})"
        return self._json(schema)

    def _harmony(self, name: str, schema: Mapping[str, Any]) -> str:
        constrain = f"({self.literal('<|constrain|>')})?"
        channel = self.literal("<|channel|>commentary")
        header = f'({channel} " "? {constrain} "json" | " " {constrain} "json")'
        return f"{self.literal(' to=functions.' + name)} {header} {self.literal('<|message|>')} {self._object(schema)}"

    def _generic(self) -> str:
        names = [self.request.choice.name] if self.request.choice.name else list(self.request.tools)
        calls = []
        for name in names:
            begin = self.literal(
                '{"tool_call": {"name": ' + json.dumps(name, ensure_ascii=False) + ', "arguments": '
            )
            calls.append(self._rule(f'{begin} {self._object(self.request.tools[name])} "}}}}"'))
        if self.request.choice.kind == "auto":
            text = self._json({"type": "string"})
            calls.append(
                self._rule(f'{self.literal("{" + chr(34) + "response" + chr(34) + ": ")} {text} "}}"')
            )
        return self._rule(" | ".join(calls))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
