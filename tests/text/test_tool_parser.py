"""Answers in pieces: however they are cut, the events add up to the same; nothing raises, nothing is lost."""

# ruff: noqa: E501 (an answer is one line)

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.text import ChatTemplate
from motley.text.tools import (
    ArgumentsDelta,
    CallStart,
    ChatParser,
    ContentDelta,
    Event,
    ParsedAnswer,
    Reasoning,
    Style,
    ToolFormat,
    parse_answer,
)
from motley.text.tools.exceptions import DEEPSEEK_R1, FUNCTIONARY, GEMMA, GRANITE, LFM, LLAMA
from motley.text.tools.format import JsonCall, NamedCall, TaggedCall
from motley.text.tools.harmony import HarmonyParser
from motley.text.tools.session import AnswerParser
from thorough import examples

THINK = Reasoning("<think>", "</think>")
HERMES = ToolFormat(
    Style.JSON, call_start="<tool_call>\n", call_end="\n</tool_call>", separator="\n", reasoning=THINK
)
MISTRAL = ToolFormat(
    Style.JSON,
    section_start="[TOOL_CALLS][",
    section_end="]",
    separator=", ",
    json=JsonCall("name", "arguments", "id"),
)
APERTUS = ToolFormat(
    Style.JSON,
    section_start="<|tools_prefix|>[",
    section_end="]<|tools_suffix|>",
    separator=", ",
    json=JsonCall(is_keyed_by_name=True),
)
CODER = ToolFormat(
    Style.TAGGED,
    call_start="<tool_call>\n<function=",
    call_end="\n</function>\n</tool_call>",
    separator="\n",
    tagged=TaggedCall(">", "\n<parameter=", ">\n", ">\n", "\n</parameter>"),
    reasoning=THINK,
)
GLM = ToolFormat(
    Style.TAGGED,
    call_start="<tool_call>",
    call_end="\n</tool_call>",
    separator="\n",
    tagged=TaggedCall(
        "", "\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_key>\n<arg_value>", "</arg_value>"
    ),
    reasoning=THINK,
)
DSML = ToolFormat(
    Style.TAGGED,
    section_start="<D|calls>\n",
    section_end="\n</D|calls>",
    call_start='<D|invoke name="',
    call_end="\n</D|invoke>",
    separator="\n",
    tagged=TaggedCall('">', '\n<D|p name="', '" string="true">', '" string="false">', "</D|p>"),
)
KIMI = ToolFormat(
    Style.NAMED_JSON,
    section_start="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    call_start="<|tool_call_begin|>functions.",
    call_end="<|tool_call_end|>",
    named=NamedCall((":", "<|tool_call_argument_begin|>")),
)
GENERIC = ToolFormat(Style.GENERIC, shows_tools=False)
FORMS = {
    "hermes": HERMES,
    "mistral": MISTRAL,
    "apertus": APERTUS,
    "coder": CODER,
    "glm": GLM,
    "dsml": DSML,
    "generic": GENERIC,
    "deepseek": DEEPSEEK_R1,
    "functionary": FUNCTIONARY,
    "gemma": GEMMA,
    "granite": GRANITE,
    "kimi": KIMI,
    "lfm": LFM,
    "llama": LLAMA,
}
TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "m": {"type": ["string", "null"]},
            "o": {"type": "object"},
            "r": {"$ref": "#/$defs/number"},
        },
        "$defs": {"number": {"type": "number"}},
    },
    "g": {"type": "object", "properties": {}},
}


def make_parser(name: str, is_reasoning: bool = False) -> AnswerParser:
    ids = itertools.count()
    make_id: Callable[[], str] = lambda: f"call_{next(ids)}"  # noqa: E731
    if name == "harmony":
        return HarmonyParser(make_id=make_id)
    return ChatParser(FORMS[name], tools=TOOLS, is_reasoning=is_reasoning, make_id=make_id)


def read(parser: AnswerParser, pieces: Sequence[str]) -> ParsedAnswer:
    answer = ParsedAnswer()
    for piece in pieces:
        answer.add(parser.push(piece))
    return answer.add(parser.finish())


def fragments(name: str) -> list[str]:
    """Pieces from which texts are made that come near to calls."""
    form = FORMS.get(name)
    common = [
        "{",
        "}",
        '"',
        ", ",
        "\n",
        " ",
        "hello",
        "<",
        "[",
        "]",
        "é😀",
        "\\",
        "f",
        "g",
        "name",
        ": ",
        "1",
        "true",
    ]
    common += [
        '{"s": "a<b", "n": 2}',
        '{"name": "f", "arguments": {"s": "x"}}',
        '"arguments": ',
        '{"name": "g"',
        ">>>",
    ]
    common += [
        '{"parameters": {}, "name": "f"}',
        "<|python_tag|>",
        '{"response": "a\\n\\ud83d\\ude00"}',
        "f(s='x', n=[1])",
    ]
    common += [
        '{"tool_call": {"name": "f", "arguments": {}}}',
        'f{s:<|"|>x<|"|>,n:[1,2]}',
        "<think>",
        "</think>",
    ]
    if form is None:
        return [
            *common,
            "<|channel|>analysis",
            "<|channel|>final",
            "<|message|>",
            "<|end|>",
            "<|start|>assistant",
            "<|call|>",
            " to=functions.f<|channel|>commentary json",
            "<|return|>",
        ]
    parts = [
        form.section_start,
        form.section_end,
        form.call_start,
        form.call_end,
        form.separator,
        form.trigger,
    ]
    parts += [form.content_start, *form.named.name_end]
    if form.tagged:
        parts += [
            form.tagged.name_end,
            form.tagged.key_start,
            form.tagged.value_start,
            form.tagged.json_start,
        ]
        parts += [
            form.tagged.value_end,
            form.tagged.key_start + "s" + form.tagged.value_start + "text" + form.tagged.value_end,
        ]
        parts += [form.tagged.key_start + "n" + form.tagged.json_start + "12" + form.tagged.value_end]
    return [*common, *(part for part in parts if part), form.opening + "f" + form.named.name_end[0]]


@pytest.mark.parametrize("name", [*FORMS, "harmony"])
def test_every_cut_gives_the_same_answer(name: str) -> None:
    texts = st.lists(st.sampled_from(fragments(name)), max_size=14).map("".join)

    @settings(max_examples=examples(120), deadline=None, derandomize=True)
    @given(text=texts, cuts=st.lists(st.integers(0, 200), max_size=12), is_reasoning=st.booleans())
    def check(text: str, cuts: list[int], is_reasoning: bool) -> None:
        whole = read(make_parser(name, is_reasoning), [text])
        places = sorted({min(cut, len(text)) for cut in cuts})
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
        assert read(make_parser(name, is_reasoning), pieces) == whole
        assert read(make_parser(name, is_reasoning), list(text)) == whole

    check()


@pytest.mark.parametrize("name", [*FORMS, "harmony"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(text=st.text(max_size=80))
def test_text_without_calls_is_content(name: str, text: str) -> None:
    answer = read(make_parser(name), list(text))
    if name in ("functionary",):
        assert answer.content.removeprefix(">>>").strip() == text.strip()
    else:
        assert answer == ParsedAnswer(content=text) or not text.strip()


def calls_of(answer: ParsedAnswer) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


SAMPLES = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"s": "x", "n": 2}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"s": "x", "n": 2}, "id": "abcdefghi"}, {"name": "g", "arguments": {}, "id": "abcdefghj"}]',
    "apertus": '<|tools_prefix|>[{"f": {"s": "x", "n": 2}}, {"g": {}}]<|tools_suffix|>',
    "coder": "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
    "dsml": '<D|calls>\n<D|invoke name="f">\n<D|p name="s" string="true">x</D|p>\n<D|p name="n" string="false">2</D|p>\n</D|invoke>\n<D|invoke name="g">\n</D|invoke>\n</D|calls>',
    "generic": '{"tool_calls": [{"name": "f", "arguments": {"s": "x", "n": 2}}, {"name": "g", "arguments": {}}]}',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "x", "n": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "functionary": 'f\n{"s": "x", "n": 2}>>>g\n{}',
    "gemma": '<|tool_call>call:f{s:<|"|>x<|"|>,n:2}<tool_call|><|tool_call>call:g{}<tool_call|>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"s": "x", "n": 2}}, {"name": "g", "arguments": {}}]',
    "kimi": '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "x", "n": 2}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>',
    "lfm": "<|tool_call_start|>[f(s='x', n=2), g()]<|tool_call_end|>",
    "llama": '{"name": "f", "parameters": {"s": "x", "n": 2}}\n{"name": "g", "parameters": {}}',
    "harmony": ' to=functions.f<|channel|>commentary json<|message|>{"s": "x", "n": 2}<|call|><|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}<|call|>',
}


@pytest.mark.parametrize("name", SAMPLES)
def test_two_calls(name: str) -> None:
    answer = read(make_parser(name), list(SAMPLES[name]))
    assert calls_of(answer) == [("f", {"s": "x", "n": 2}), ("g", {})]
    assert answer.content == ""
    assert [call.id for call in answer.calls] == ["call_0", "call_1"]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_truncation_ends_as_content_or_as_arguments_so_far(name: str) -> None:
    whole = read(make_parser(name), [SAMPLES[name]])
    for n in range(len(SAMPLES[name])):
        text = SAMPLES[name][:n]
        answer = read(make_parser(name), [text])
        assert answer == read(make_parser(name), list(text))
        assert len(answer.calls) <= 2
        for call, complete in zip(answer.calls, whole.calls, strict=False):
            assert call.name == complete.name
            assert complete.arguments.startswith(call.arguments)
        if not answer.calls:
            assert answer.content.removeprefix(">>>").strip() == text.strip() or name == "generic"


def test_a_name_comes_whole_and_once_and_arguments_as_they_are_written() -> None:
    events: list[Event] = []
    parser = make_parser("hermes")
    for c in SAMPLES["hermes"]:
        events += parser.push(c)
    events += parser.finish()
    assert [event for event in events if isinstance(event, CallStart)] == [
        CallStart(0, "call_0", "f"),
        CallStart(1, "call_1", "g"),
    ]
    assert [event.text for event in events if isinstance(event, ArgumentsDelta) and event.index == 0] == list(
        '{"s": "x", "n": 2}'
    )
    assert not any(isinstance(event, ContentDelta) for event in events)


def test_raw_arguments_get_their_types_from_the_schema() -> None:
    def call(key: str, value: str) -> object:
        text = (
            f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        )
        return json.loads(read(make_parser("coder"), list(text)).calls[0].arguments)[key]

    assert call("s", "12") == "12"
    assert call("s", 'a "quoted"\nline\n\nand <b>') == 'a "quoted"\nline\n\nand <b>'
    assert call("n", "12") == 12
    assert call("n", "twelve") == "twelve"
    assert call("m", "null") is None
    assert call("m", "12") == "12"
    assert call("o", '{"a": [1, 2]}') == {"a": [1, 2]}
    assert call("r", "1.5") == 1.5
    assert call("unknown", "true") is True
    assert call("unknown", "words") == "words"


def test_reasoning_before_a_call_and_content_between() -> None:
    text = "<think>\nHm.\n</think>\n\nLet me look.\n\n" + SAMPLES["hermes"]
    answer = read(make_parser("hermes"), list(text))
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("Hm.", "Let me look.", 2)
    answer = read(make_parser("hermes", is_reasoning=True), list(text.removeprefix("<think>")))
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("Hm.", "Let me look.", 2)
    # A model that forgets to end its reasoning still calls.
    answer = read(make_parser("hermes", is_reasoning=True), ["Hm. " + SAMPLES["hermes"]])
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("Hm.", "", 2)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nno JSON\n</tool_call>",
        '<tool_call>\n{"arguments": {"s": 1}}\n</tool_call>',
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f"',
        '<tool_call>[{"name": "f", "arguments": {}}]',
        "I may write <tool_call> in a sentence.",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert read(make_parser("hermes"), list(text)) == ParsedAnswer(content=text)


def test_a_call_that_breaks_keeps_its_arguments_and_the_rest_is_content() -> None:
    answer = read(
        make_parser("hermes"), ['<tool_call>\n{"name": "f", "arguments": {"s": oops}}\n</tool_call> Sorry.']
    )
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"s": ')]
    assert answer.content == "oops}}\n</tool_call> Sorry."


def test_arguments_before_the_name_as_text_or_missing() -> None:
    for arguments in (
        '{"arguments": {"s": "x"}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"s\\": \\"x\\"}"}',
    ):
        assert calls_of(read(make_parser("hermes"), list(f"<tool_call>{arguments}</tool_call>"))) == [
            ("f", {"s": "x"})
        ]
    assert calls_of(read(make_parser("hermes"), ['<tool_call>{"name": "g"}</tool_call>'])) == [("g", {})]
    assert calls_of(read(make_parser("hermes"), ['<tool_call>{"name": "g", "arguments": null}'])) == [
        ("g", {})
    ]


def test_bare_json_is_a_call_only_with_a_known_name() -> None:
    text = '{"name": "unknown", "parameters": {}}'
    assert read(make_parser("llama"), list(text)) == ParsedAnswer(content=text)
    text = '<|python_tag|>{"name": "g", "parameters": {}}'
    assert calls_of(read(make_parser("llama"), list(text))) == [("g", {})]
    text = 'For example {"name": "g", "parameters": {}}'
    assert read(make_parser("llama"), list(text)) == ParsedAnswer(content=text)


def test_generic_responses_are_content() -> None:
    answer = read(make_parser("generic"), list('{"response": "Grüß \\"dich\\"\\n\\ud83d\\ude00\\ud83d!"}'))
    assert answer == ParsedAnswer(content='Grüß "dich"\n😀\ufffd!')
    assert read(make_parser("generic"), ["Just text."]) == ParsedAnswer(content="Just text.")


def test_harmony_channels() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
    assert read(make_parser("harmony"), list(text)) == ParsedAnswer(content="Hello.", reasoning="Hm.")
    assert read(make_parser("harmony"), ["Hello, no channel."]) == ParsedAnswer(content="Hello, no channel.")


def test_without_tools_markers_are_text() -> None:
    text = 'Write <tool_call>{"name": "f"}</tool_call> \n'
    parser = ChatParser(HERMES)
    assert parse_answer(parser, text) == ParsedAnswer(content=text)


def test_the_bundled_template_is_hermes() -> None:
    from training.chat import TEMPLATE

    from motley.text.tools import derive_format

    form = derive_format(ChatTemplate(TEMPLATE))
    assert (form.style, form.opening, form.call_end) == (Style.JSON, "<tool_call>\n", "\n</tool_call>")
