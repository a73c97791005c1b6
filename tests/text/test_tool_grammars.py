"""Grammars of tool calls: whatever a sampler picks under them, the answer is read as calls that match the schemas."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.gguf import read_spec
from motley.text import ChatTemplate, Tokenizer
from motley.text.tools import ChatFormat, ParsedAnswer, Style, ToolFormat, ToolSession
from motley.text.tools.format import KEY

llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed: grammars are not tried")


def tool(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}


TOOLS = [
    tool(
        "get_weather",
        {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
            "place": {
                "type": "object",
                "properties": {"lat": {"type": "number"}, "is_sea": {"type": "boolean"}},
                "required": ["lat"],
                "additionalProperties": False,
            },
        },
        ["city", "days"],
    ),
    tool("now", {}, []),
    tool("set_flag", {"flag": {"type": "boolean"}, "note": {"type": "string"}}, []),
]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
# One template of each way to write calls.
NAMES = [
    "Qwen-Qwen3-0.6B",
    "Apertus-8B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Cohere2MoE",
    "meta-llama-Llama-3.1-8B-Instruct",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "moonshotai-Kimi-K2",
    "upstage-Solar-Open-100B",
    "llama-cpp-deepseek-r1",
    "deepseek-ai-DeepSeek-V3.1",
    "meetkai-functionary-medium-v3.2",
    "Qwen3-Coder",
    "GLM-4.6",
    "Kimi-K3",
    "MiniMax-M3",
    "deepseek-ai-DeepSeek-V3.2",
    "tencent-Hy3",
    "LFM2-8B-A1B",
    "google-gemma-4-31B-it",
    "openai-gpt-oss-120b",
    "google-gemma-2-2b-it",
]


@pytest.fixture(scope="module")
def tokenizer(bundled: Path) -> Tokenizer:
    return Tokenizer.from_spec(read_spec(bundled))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Any:
    class Pieces:
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]  # noqa: RUF012
        eos_token_id, bos_token_id = tokenizer.token_id("<|im_end|>"), tokenizer.bos_id
        special_token_ids = list(range(5))  # noqa: RUF012

        def __call__(self, text: bytes | str) -> list[int]:
            return tokenizer.encode(text.decode() if isinstance(text, bytes) else text, add_special=False)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Pieces()))


@pytest.fixture(scope="module")
def formats(shared: Path) -> Any:
    @cache
    def make(name: str) -> ChatFormat:
        source = (shared / "data" / "templates" / f"{name}.jinja").read_text()
        return ChatFormat(ChatTemplate(source, bos="<BOS>", eos="<EOS>"))

    return make


class Sampler:
    """Picks at random from what a grammar allows, and finds an end."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Any, seed: int) -> None:
        self._pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        self._vocabulary, self._random = vocabulary, random.Random(seed)
        self._end = tokenizer.token_id("<|im_end|>")
        self._closing = [i for i, piece in enumerate(self._pieces) if piece[:1] in b'"}]<|\n[`' and piece]

    def answer(self, grammar: str, ends: Sequence[str], start: str = "") -> str:
        """`ends`: texts that end free text, which pieces at random would never do."""
        # Reasoning is optional; a choice at random would often begin it, and never end it.
        grammar = re.sub(r"^start: \(.*?\)\? ", "start: ", grammar)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        if start:
            assert matcher.consume_tokens(self._vocabulary.tokenize_str(start)), matcher.get_error()
        text = start.encode()
        for step in range(1500):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            is_allowed = np.unpackbits(bits, bitorder="little")
            allowed = np.flatnonzero(is_allowed).tolist()
            assert allowed, matcher.get_error()
            if step % 10 == 9 and (end := self._ending(matcher, ends)):
                text += end.encode()
                continue
            closing = [i for i in self._closing if i != self._end and is_allowed[i]]
            if self._end in allowed and (len(allowed) == 1 or step > 200 or self._random.random() < 0.5):
                return text.decode(errors="replace")
            allowed = [i for i in allowed if i != self._end]
            if closing and self._random.random() < min(0.9, 0.3 + step / 100):
                allowed = [min(closing, key=lambda i: len(self._pieces[i]))] if step > 300 else closing
            token = self._random.choice(allowed)
            assert matcher.consume_token(token), matcher.get_error()
            text += self._pieces[token]
            if matcher.is_stopped():
                return text.decode(errors="replace")
        raise AssertionError(f"no end: {text[-300:]!r}")

    def _ending(self, matcher: Any, ends: Sequence[str]) -> str | None:
        for end in self._random.sample(ends, len(ends)):
            tokens = self._vocabulary.tokenize_str(end)
            if matcher.deep_copy().try_consume_tokens(tokens) == len(tokens):
                assert matcher.consume_tokens(tokens)
                return end
        return None


def ends_of(form: ToolFormat) -> list[str]:
    """Of free text in a format. Where it is no end, it is text as any other."""
    if form.tagged:
        return [form.tagged.value_end.replace(KEY, key).strip() for key in ("city", "note")]
    return ['<|"|>'] if form.style is Style.GEMMA else ['"']


def thought_of(form: ToolFormat, session: ToolSession) -> str:
    """Reasoning, if the prompt has opened it."""
    reasoning = form.reasoning
    if reasoning is None or not session.prompt.rstrip().endswith(reasoning.start.strip()):
        return ""
    return "Hm." + reasoning.end.strip()


def read(session: ToolSession, text: str) -> ParsedAnswer:
    parser = session.parser()
    return ParsedAnswer().add(parser.push(text)).add(parser.finish())


def check_calls(answer: ParsedAnswer, text: str) -> None:
    for call in answer.calls:
        errors = list(violations(json.loads(call.arguments), SCHEMAS[call.name]))
        assert not errors, (errors, text)


def session_of(form: ChatFormat, **options: Any) -> ToolSession:
    return form.session([{"role": "user", "content": "Go."}], tools=TOOLS, **options)


@pytest.mark.parametrize("name", NAMES)
def test_required_calls_are_calls_and_match_their_schemas(
    formats: Any, tokenizer: Tokenizer, vocabulary: Any, name: str
) -> None:
    form = formats(name).format
    session = session_of(formats(name), tool_choice="required")
    assert session.grammar is not None
    assert session.grammar_triggers == ()
    for seed in range(6):
        text = Sampler(tokenizer, vocabulary, seed).answer(
            session.grammar, ends_of(form), thought_of(form, session)
        )
        answer = read(session, text)
        assert answer.calls, text
        assert answer.content.strip() == "", text
        check_calls(answer, text)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_call_is_that_one_and_alone(
    formats: Any, tokenizer: Tokenizer, vocabulary: Any, name: str
) -> None:
    choice = {"type": "function", "function": {"name": "set_flag"}}
    form = formats(name).format
    session = session_of(formats(name), tool_choice=choice, parallel_tool_calls=False)
    assert session.grammar is not None
    for seed in range(2):
        text = Sampler(tokenizer, vocabulary, seed).answer(
            session.grammar, ends_of(form), thought_of(form, session)
        )
        answer = read(session, text)
        assert [call.name for call in answer.calls] == ["set_flag"], text
        check_calls(answer, text)


@pytest.mark.parametrize("name", NAMES)
def test_auto_begins_with_the_trigger(formats: Any, tokenizer: Tokenizer, vocabulary: Any, name: str) -> None:
    form = formats(name).format
    session = session_of(formats(name))
    assert session.grammar is not None
    if form.style is Style.GENERIC or form.primer:
        assert session.grammar_triggers == ()
        text = Sampler(tokenizer, vocabulary, 1).answer(
            session.grammar, ends_of(form), thought_of(form, session)
        )
        answer = read(session, text)
        assert bool(answer.calls) != text.startswith(('{"response"', "all\n"))
        return
    for seed, trigger in enumerate(3 * session.grammar_triggers):
        text = Sampler(tokenizer, vocabulary, seed).answer(session.grammar, ends_of(form), start=trigger)
        parsed = read(session, ("Well. " if form.trigger else "") + text)
        assert parsed.calls, text
        check_calls(parsed, text)


def test_triggers_are_not_in_ordinary_text(formats: Any) -> None:
    assert session_of(formats("meta-llama-Llama-3.1-8B-Instruct")).grammar_triggers == (
        '{"name": "get_weather"',
        '{"name": "now"',
        '{"name": "set_flag"',
    )
    command = formats("CohereForAI-c4ai-command-r-plus-tool_use")
    assert session_of(command).grammar_triggers == ("Action:\n```json\n[",)


ODD = {
    "look-around": {"type": "string", "pattern": "^(?=a)b$"},
    "reference in a pattern": {"type": "string", "pattern": r"(a)\\1"},
    "broken pattern": {"type": "string", "pattern": "["},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "unique": {"type": "array", "uniqueItems": True},
    "remote": {"$ref": "https://example.com/schema.json"},
    "nowhere": {"$ref": "#/$defs/none"},
    "format": {"type": "string", "format": "uint8"},
    "long": {"type": "string", "maxLength": 10**9},
    "many": {"type": "array", "minItems": 10**9},
    "no such type": {"type": "any"},
    "null as type": {"type": None},
    "half a type": {"type": ["string", "text"]},
    "types that are none": {"type": [["string"], {}, None]},
    "pattern properties": {"type": "object", "patternProperties": {"^x(?!y)": {"type": "string"}}},
    "required as a flag": {"type": "string", "required": True},
    "a bool": True,
    "a number": 7,
    "itself": {"$ref": "#"},
}


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen3-Coder", "LFM2-8B-A1B", "google-gemma-4-31B-it"])
@pytest.mark.parametrize("odd", ODD)
def test_odd_schemas_do_not_hinder_calls(formats: Any, vocabulary: Any, name: str, odd: str) -> None:
    """Agents send whole sets of tools; one odd schema must not cost them all calls."""
    schema = {"type": "object", "properties": {"x": ODD[odd], "y": {"type": "string"}}}
    given = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    session = formats(name).session([{"role": "user", "content": "Go."}], tools=given)
    matcher = llguidance.LLMatcher(vocabulary, session.grammar)
    assert not matcher.is_error(), matcher.get_error()


def test_notes_are_not_in_grammars_but_properties_of_their_names_are(formats: Any) -> None:
    properties = {"description": {"type": "string", "description": "LONG NOTE"}, "title": {"type": "integer"}}
    given = [tool("f", properties, ["description"])]
    session = formats("Qwen-Qwen3-0.6B").session([{"role": "user", "content": "Go."}], tools=given)
    assert "LONG NOTE" in session.prompt
    assert "LONG NOTE" not in (session.grammar or "")
    assert '"description": {"type": "string"}' in (session.grammar or "")


def test_hundreds_of_tools_have_no_grammar_unless_a_call_is_required(formats: Any) -> None:
    given = [tool(f"f{i}", {f"p{j}": {"type": "string"} for j in range(20)}, []) for i in range(300)]
    form = formats("Qwen-Qwen3-0.6B")
    assert form.session([{"role": "user", "content": "Go."}], tools=given).grammar is None
    assert form.session([{"role": "user", "content": "Go."}], tools=given, tool_choice="required").grammar


def test_none_has_no_grammar_and_no_tools(formats: Any) -> None:
    session = session_of(formats("Qwen-Qwen3-0.6B"), tool_choice="none")
    assert session.grammar is None
    assert "get_weather" not in session.prompt


def test_thinking_comes_before_a_required_call(formats: Any, tokenizer: Tokenizer, vocabulary: Any) -> None:
    open_prompt = session_of(formats("Qwen3.5-4B"), tool_choice="required")
    ends = ends_of(formats("Qwen3.5-4B").format)
    assert open_prompt.prompt.rstrip().endswith("<think>")
    for seed in range(3):
        text = Sampler(tokenizer, vocabulary, seed).answer(
            open_prompt.grammar or "", ends, start="Let me see.\n</think>"
        )
        answer = read(open_prompt, text)
        assert answer.reasoning == "Let me see."
        assert answer.calls
    closed = session_of(formats("Qwen3.5-4B"), tool_choice="required", enable_thinking=False)
    matcher = llguidance.LLMatcher(vocabulary, closed.grammar)
    assert not matcher.consume_tokens(vocabulary.tokenize_str("Let me see."))


def test_control_tokens_are_named_by_id(shared: Path) -> None:
    source = (shared / "data" / "templates" / "moonshotai-Kimi-K2.jinja").read_text()
    ids = {"<|tool_calls_section_begin|>": 7, "<|tool_call_begin|>": 8}
    session = session_of(ChatFormat(ChatTemplate(source), special_id=ids.get), tool_choice="required")
    assert '<[7]> <[8]> "functions."' in (session.grammar or "")


def violations(value: Any, schema: Mapping[str, Any]) -> Any:
    """What a value does against the part of JSON Schema that these tools use."""
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
    }
    kind = schema["type"]
    if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{value!r} is not in the enum"
    if kind == "integer" and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{value!r} is out of range"
    if kind == "array":
        if len(value) > schema.get("maxItems", len(value)):
            yield "too many items"
        for item in value:
            yield from violations(item, schema["items"])
    if kind == "string" and len(value) > schema.get("maxLength", len(value)):
        yield "too long"
    if kind == "object":
        for key in schema.get("required", ()):
            if key not in value:
                yield f"{key} is missing"
        for key, item in value.items():
            if key not in schema["properties"]:
                yield f"{key} is unknown"
            else:
                yield from violations(item, schema["properties"][key])
