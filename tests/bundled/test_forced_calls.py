"""Tool calls of the bundled model under grammars, through `LLM`: whatever it would say, calls match their schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motley.engine import SamplingParams
from motley.llm import LLM
from motley.text.tools import ChatFormat, ParsedAnswer, ToolSession

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: calls are not checked")
pytest.importorskip("llguidance", reason="llguidance is not installed: calls are not enforced")

WORDS = [
    "city",
    "name",
    "colour",
    "day",
    "place",
    "hobby",
    "count",
    "price",
    "title",
    "street",
    "food",
    "animal",
]


@pytest.fixture(scope="module")
def llm(bundled: Path) -> Iterator[LLM]:
    with LLM(bundled, n_ctx=2048, n_parallel=8) as made:
        yield made


@pytest.fixture(scope="module")
def formats(llm: LLM) -> ChatFormat:
    return ChatFormat(llm.chat_template)


def any_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    # Texts are short and there are no fractions: a small model may go on with digits for ever.
    kinds = ["string", "enum", "integer", "boolean", "null"] + ["array", "object"] * (depth < 2)
    match rng.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": rng.randint(3, 20)}
        case "enum":
            return {"enum": rng.sample(["red", "blue", 7, True, None, "two words", 'a "quote"'], 3)}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 100)}
        case "array":
            return {"type": "array", "items": any_schema(rng, depth + 1), "minItems": 1, "maxItems": 3}
        case "object":
            return any_object(rng, depth + 1)
        case kind:
            return {"type": kind}


def any_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0 if depth == 0 else 1, 4))
    return {
        "type": "object",
        "properties": {name: any_schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def any_tools(rng: random.Random) -> list[dict[str, Any]]:
    names = rng.sample(["find_city", "add-note", "play.song", "turn_on", "x"], rng.randint(1, 3))
    return [
        {
            "type": "function",
            "function": {"name": name, "description": "A tool.", "parameters": any_object(rng)},
        }
        for name in names
    ]


def read(session: ToolSession, text: str) -> ParsedAnswer:
    parser = session.parser()
    answer = ParsedAnswer()
    for piece in text:
        answer.add(parser.push(piece))
    return answer.add(parser.finish())


def options(session: ToolSession, **more: Any) -> SamplingParams:
    return SamplingParams(
        grammar=session.grammar, grammar_triggers=session.grammar_triggers, max_tokens=1500, **more
    ).with_stops(session.stops)


def test_forced_calls_match_their_schemas_for_many_schemas_and_seeds(llm: LLM, formats: ChatFormat) -> None:
    rng = random.Random(16)
    sessions, tools = [], []
    for _ in range(24):
        given = any_tools(rng)
        choice = rng.choice(
            ["required", {"type": "function", "function": {"name": given[0]["function"]["name"]}}]
        )
        question = [
            {"role": "user", "content": rng.choice(["Help me.", "What is the weather in Graz?", "Sing!"])}
        ]
        sessions.append(
            formats.session(question, tools=given, tool_choice=choice, parallel_tool_calls=rng.random() < 0.3)
        )
        tools.append(given)
    prompts = [llm.tokenizer.encode_marked(session.prompt) for session in sessions]
    params = [options(session, temperature=1.0, seed=i) for i, session in enumerate(sessions)]
    for session, given, done in zip(sessions, tools, llm.generate(prompts, params=params), strict=True):
        assert done.finish_reason == "stop", done.text[-200:]
        answer = read(session, done.text)
        assert answer.calls, done.text
        assert answer.content == "", done.text
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in given}
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def test_auto_calls_where_a_tool_fits_and_answers_where_none_is_asked_for(
    llm: LLM, formats: ChatFormat
) -> None:
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Gets the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The city"}},
                "required": ["city"],
            },
        },
    }
    texts = ["What is the weather in Lonbury?", "What is your name?"]
    sessions = [formats.session([{"role": "user", "content": text}], tools=[weather]) for text in texts]
    assert all(session.grammar_triggers == ("<tool_call>",) for session in sessions)
    prompts = [llm.tokenizer.encode_marked(session.prompt) for session in sessions]
    params = [options(session, temperature=0.0) for session in sessions]
    called, told = (
        read(session, done.text)
        for session, done in zip(sessions, llm.generate(prompts, params=params), strict=True)
    )
    assert [call.name for call in called.calls] == ["get_weather"], called.content
    assert json.loads(called.calls[0].arguments) == {"city": "Lonbury"}
    assert "Motley" in told.content
    assert told.calls == []
