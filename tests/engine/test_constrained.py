"""Answers that match a schema, a regex or a grammar, alone and beside free ones."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import pytest
from tests.engine.by_hand import stepped_by_hand

from motley import LLM, MotleyError
from motley.errors import RequestError
from motley.grammar.matcher import EagerMatcher


@pytest.fixture(scope="module")
def llm(bundled: Path) -> LLM:
    return LLM(bundled, n_ctx=512, n_parallel=8)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Schemas that every answer can finish: strings, arrays and numbers have limits."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "format"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "anyOf"])
    match kind:
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": 10}
        case "enum":
            return {"enum": rng.sample(["red", "grün", 'a "quoted" word', "", 7, None, "𝄞"], 3)}
        case "const":
            return {"const": rng.choice([{"a": [1, "x"]}, "once", 12.5])}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])}
        case "array":
            low = rng.randint(0, 2)
            items = random_schema(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case "object":
            names = rng.sample(["name", "age", "größe", "a b", "x"], rng.randint(1, 3))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = rng.sample(names, rng.randint(0, len(names)))
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
    return {"type": kind}


def test_answers_match_random_schemas(llm: LLM) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(30)]
    wild: dict[str, Any] = {"temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0}  # or digits go on and on
    n_finished = 0
    for number, schema in enumerate(schemas):
        for seed in range(2):
            answer = llm.generate("Some JSON: ", json_schema=schema, seed=seed, max_tokens=400, **wild)
            if answer.finish_reason == "stop":
                n_finished += 1
                jsonschema.validate(
                    json.loads(answer.text), schema, format_checker=jsonschema.FormatChecker()
                )
            else:
                assert answer.finish_reason == "length", number
    assert n_finished > 50


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[a-z]{2,4}", r"(yes|no)!?", r"\d+(\.\d{1,3})?", "ä{3}[𝄞é]+x"])
def test_answers_match_a_regex(llm: LLM, pattern: str) -> None:
    for seed in range(4):
        answer = llm.generate("Once", regex=pattern, seed=seed, max_tokens=60)
        assert answer.finish_reason == "length" or re.fullmatch(pattern, answer.text)
    assert re.fullmatch(r"(yes|no)!?", llm.generate("Is it?", regex=r"(yes|no)!?", temperature=0).text)


def test_answers_match_gbnf(llm: LLM) -> None:
    grammar = 'root ::= move " " move\nmove ::= [a-h] [1-8] # a field\n'
    for seed in range(4):
        answer = llm.generate("Chess: ", grammar=grammar, seed=seed)
        assert re.fullmatch("[a-h][1-8] [a-h][1-8]", answer.text)
        assert answer.finish_reason == "stop"


def test_json_object_is_an_object_even_with_a_token_of_an_array_in_mind(llm: LLM) -> None:
    bracket = llm.tokenizer.encode("[", add_special=False)[0]
    answer = llm.generate("[1, 2, 3], [", json_object=True, logit_bias={bracket: 50}, max_tokens=3, seed=0)
    assert answer.text.lstrip().startswith("{")


def test_torn_characters_in_json_strings(llm: LLM) -> None:
    """Tokens of single bytes: the mask only allows what becomes whole characters."""
    byte_ids = [i for i in range(llm.tokenizer.n_vocab) if llm.tokenizer.token_bytes(i)[:1] >= b"\xc3"]
    schema = {"type": "string", "minLength": 3, "maxLength": 6}
    for seed in range(4):
        answer = llm.generate(
            "x", json_schema=schema, seed=seed, logit_bias=dict.fromkeys(byte_ids, 12.0), top_k=0
        )
        assert answer.finish_reason == "stop"
        assert "\N{REPLACEMENT CHARACTER}" not in answer.text
        assert 3 <= len(json.loads(answer.text)) <= 6


def test_constrained_and_free_answers_in_one_batch_are_those_of_each_alone(llm: LLM) -> None:
    options: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
        {"seed": 3, "regex": "[a-z ]{5,20}"},
        {"temperature": 0},
        {"seed": 4, "grammar": 'start: "the " /[a-z]+/ "."', "grammar_triggers": ("the ",)},
    ]
    alone = [llm.generate("Once upon a time", max_tokens=24, **each).text for each in options]
    with stepped_by_hand(llm) as step:
        streams = [llm.stream("Once upon a time", max_tokens=24, **each) for each in options]
        step(30)
        together = [stream.result().text for stream in streams]
    assert together == alone
    assert len(set(alone)) == len(alone)


def test_a_lazy_grammar_binds_after_its_trigger(llm: LLM) -> None:
    start = llm.tokenizer.token_id("<tool_call>")
    assert start is not None
    call = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["n"],
        "additionalProperties": False,
    }
    grammar = f'start: "<tool_call>" %json {json.dumps(call)} "</tool_call>"'
    for seed in range(4):
        answer = llm.generate(
            "Once upon",
            grammar=grammar,
            grammar_triggers=("<tool_call>",),
            logit_bias={start: 15.0},
            seed=seed,
            max_tokens=60,
        )
        text, _, rest = answer.text.partition("<tool_call>")
        assert rest.endswith("</tool_call>"), text
        assert set(json.loads(rest.removesuffix("</tool_call>"))) == {"n"}
        assert answer.finish_reason == "stop"


def test_stop_strings_and_limits_end_a_constrained_answer(llm: LLM) -> None:
    answer = llm.generate("x", regex="a{200}", max_tokens=3, temperature=0)
    assert answer.finish_reason == "length"
    assert set(answer.text) == {"a"}
    assert llm.generate("x", regex="[ab]{50}c", stop="b", seed=1).finish_reason == "stop"


def test_an_end_token_ends_a_constrained_answer_even_if_ends_are_ignored(llm: LLM) -> None:
    end = dict.fromkeys(llm.tokenizer.eog_ids, 50.0)
    answer = llm.generate("x", regex="[a-z]+", ignore_eos=True, logit_bias=end, max_tokens=20, seed=0)
    assert answer.finish_reason == "stop"
    assert len(answer.tokens) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"json_schema": {"type": "nonsense"}},
        {"regex": "("},
        {"grammar": "root ::= missing"},
        {"grammar": 'start: "a"', "grammar_triggers": ("b",)},
        {"json_schema": 3},
        {"grammar": b"root"},
        {"json_object": 1},
        {"grammar_triggers": ("",), "grammar": 'start: "a"'},
    ],
    ids=str,
)
def test_a_bad_constraint_is_refused_at_once(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        llm.stream("x", **options)


def test_a_failing_grammar_engine_fails_its_request_alone(llm: LLM) -> None:
    free = llm.generate("Once upon a time", max_tokens=8, temperature=0).text
    for method in ("mask", "accept"):
        with (
            stepped_by_hand(llm) as step,
            patch.object(EagerMatcher, method, side_effect=RuntimeError("the engine broke")),
        ):
            streams = [
                llm.stream("Once upon a time", max_tokens=8, temperature=0),
                llm.stream("Once upon a time", max_tokens=8, regex="[0-9]+"),
            ]
            step(12)
            answers = [stream.result() for stream in streams]
        assert answers[0].text == free
        assert answers[1].finish_reason == "failed"
        assert "the engine broke" in str(answers[1].error)


def test_a_constrained_answer_survives_preemption(llm: LLM) -> None:
    options: dict[str, Any] = {"json_schema": {"type": "string", "maxLength": 60, "minLength": 40}, "seed": 5}
    alone = llm.generate("Once", max_tokens=40, **options)
    with stepped_by_hand(llm) as step:
        stream = llm.stream("Once", max_tokens=40, **options)
        step(5)
        assert llm._call(llm._loaded.engine.preempt)
        step(60)
        answer = stream.result()
    assert answer.timings.n_preemptions == 1
    assert answer.tokens == alone.tokens


def test_a_missing_package_says_what_to_install(llm: LLM) -> None:
    with (
        patch.dict("sys.modules", {"llguidance": None}),
        pytest.raises(MotleyError, match=r"motley-llm\[grammar\]"),
    ):
        llm.generate("x", regex="a")
