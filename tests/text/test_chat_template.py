from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from text_vocabularies import CONTROL, PREFIX, byte_level_metadata

from motley.errors import MotleyError, TemplateError
from motley.text import ChatTemplate, Tokenizer, template_names
from motley.text.sandbox import GenerationTag

SYSTEM_AND_USER = [
    {"role": "system", "content": "You are kind."},
    {"role": "user", "content": 'Is 1 < 2 & "so"? 日本'},
]
SEVERAL_TURNS = [
    *SYSTEM_AND_USER,
    {"role": "assistant", "content": "<think>Hm.</think>Yes.\n\nIt is."},
    {"role": "user", "content": " Thanks "},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather <now>, where "you" aren\'t',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Like Malmö", "enum": ["a", "b"]}},
                "required": ["city"],
            },
        },
    }
]


def now() -> datetime:
    return datetime(2025, 3, 1, 12, 30)


def plain_jinja() -> ImmutableSandboxedEnvironment:
    """The usual environment of chat templates, without any of our limits."""

    def fail(message: str) -> None:
        raise ValueError(message)

    def to_json(value: object, **options: object) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": fail, "strftime_now": lambda pattern: now().strftime(pattern)}
    return environment


def test_a_queue_in_a_namespace_is_kept_without_changing_it() -> None:
    source = (
        "{%- set ns = namespace(ids=[]) -%}"
        "{%- for m in messages -%}{%- set _ = ns.ids.append(m.content) -%}{%- endfor -%}"
        "{%- set first = ns.ids.pop(0) -%}{{ first }}, then {{ ns.ids | join(' ') }}"
    )
    texts = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    assert ChatTemplate(source).render(texts) == "a, then b c"


@pytest.fixture(scope="session")
def templates(shared: Path) -> Mapping[str, ChatTemplate]:
    paths = sorted((shared / "data" / "templates").glob("*.jinja"))
    return {p.stem: ChatTemplate(p.read_text("utf-8"), bos="<s>", eos="</s>", now=now) for p in paths}


# What five of the templates need, in their own words or in ours.
NEEDS = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "uses tools",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "uses tools",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "uses tools",
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "google-gemma-2-2b-it": "System role not supported",
}


def test_every_template_renders_a_system_and_a_user_turn_or_says_what_it_needs(
    templates: Mapping[str, ChatTemplate],
) -> None:
    assert len(templates) > 60
    for name, template in templates.items():
        if name in NEEDS:
            with pytest.raises(TemplateError, match=NEEDS[name]):
                template.render(SYSTEM_AND_USER)
        else:
            assert 'Is 1 < 2 & "so"? 日本' in template.render(SYSTEM_AND_USER), name


def test_the_limits_do_not_change_what_honest_templates_say(templates: Mapping[str, ChatTemplate]) -> None:
    environment = plain_jinja()
    n_compared = 0
    for name, template in templates.items():
        reference = environment.from_string(template.source)
        for messages, tools in (
            (SYSTEM_AND_USER, None),
            (SYSTEM_AND_USER[1:], None),
            (SEVERAL_TURNS, None),
            (SYSTEM_AND_USER, TOOLS),
        ):
            variables = {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": True,
            }
            try:
                expected = reference.render(variables, bos_token="<s>", eos_token="</s>")
            except Exception:  # a template may fail in any way; what ours says then is tested elsewhere
                continue
            assert template.render(messages, tools=tools) == expected, name
            n_compared += 1
    assert n_compared > 240


def render(source: str, messages: list[dict[str, object]] | None = None, **variables: object) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>", now=now).render(messages or [], **variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ {'a': 'é<\"', 'b': [1]}|tojson }}", '{"a": "é<\\"", "b": [1]}'),
        ("{{ {'a': 1}|tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ 'é'|tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ [{'a': 1}]|map(attribute='a')|tojson }}", "[1]"),
        ("{{ strftime_now('%Y-%m-%d') }}", "2025-03-01"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("a{% generation %}b{{ 1 }}{% endgeneration %}c", "ab1c"),
        (
            "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "3",
        ),
        ("{% macro m(a, b=2) %}{{ a ~ b }}{% endmacro %}{{ m(1) }}", "12"),
        ("{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}x{% endcall %}", "<x>"),
        (
            "{{ 'a-{}-{b}'.format(1, b='x') }} {{ '%s:%03d' % ('n', 7) }} {{ '%s'|format('q') }}",
            "a-1-x n:007 q",
        ),
        ("{{ ' a b '.strip().split(' ')|join('+') }} {{ 'aXbX'.replace('X', '-') }}", "a+b a-b-"),
        ("{{ 'a\nb'|indent(2) }} {{ 'it is'|title }} {{ 'ab'|replace('a', 'c') }}", "a\n  b It Is cb"),
        (
            "{% for a, b in {'x': 1}.items() %}{{ loop.index }}{{ a }}{{ b }}{{ loop.last }}{% endfor %}",
            "1x1True",
        ),
        (
            "{% for x in [[1, [2]]] recursive %}{{ x[0] }}{{ loop(x[1:]) if x[1] is defined }}{% endfor %}",
            "12",
        ),
        ("{{ [3, 1, 2]|sort|first }}{{ [1, 2]|last }}{{ 'abc'[::-1] }}{{ (1, 2)|list }}", "12cba[1, 2]"),
        ("{{ dict([('a', 1)], b=2) }}{{ namespace({'x': 3}).x }}", "{'a': 1, 'b': 2}3"),
        ("{{ '  x '|trim }}{{ 'xxyx'.strip('x') }}{{ 'a/b/c'.rsplit('/', 1) }}", "xy['a/b', 'c']"),
        ("{{ missing }}{{ none }}{{ [none, true] }}", "None[None, True]"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}", "AB"),
    ],
)
def test_what_templates_count_on(source: str, expected: str) -> None:
    assert render(source) == expected


def test_variables_of_the_caller_reach_the_template() -> None:
    assert render(
        "{{ enable_thinking }} {{ tools[0].name }}", enable_thinking=False, tools=[{"name": "t"}]
    ) == ("False t")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", r"refuses: roles must alternate \(line 1\)"),
        ("\n\n{{ nobody.name }}", r"uses something that is not there: 'nobody' is undefined \(line 3\)"),
        ("{{ 1 / 0 }}", r"failed: ZeroDivisionError: division by zero \(line 1\)"),
        ("\n{% if %}", "wrong in line 2"),
        ("{{ 'x'|unheard_of }}", "No filter named 'unheard_of'"),
    ],
)
def test_a_failure_says_what_and_where(source: str, complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        render(source)


def test_only_plain_data_gets_into_a_template() -> None:
    with pytest.raises(TemplateError, match=r"messages\[0\]\.content is a object"):
        render("", [{"role": "user", "content": object()}])
    cyclic: dict[str, object] = {}
    cyclic["self"] = cyclic
    with pytest.raises(TemplateError, match="nested more than 64 deep"):
        render("", [cyclic])


def test_a_rendering_leaves_no_trace_in_the_messages_or_in_the_next_one() -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": "x"}]
    template = ChatTemplate("{% set ns = namespace(n=1) %}{% set messages = [] %}{{ ns.n }}")
    assert [template.render(messages), template.render(messages)] == ["1", "1"]
    assert messages == [{"role": "user", "content": "x"}]


def test_a_file_may_have_variants_by_name() -> None:
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    assert template_names(metadata) == ["tool_use"]
    assert ChatTemplate.from_metadata(metadata).render([]) == "plain"
    assert ChatTemplate.from_metadata(metadata, name="tool_use").render([]) == "tools"
    with pytest.raises(TemplateError, match=r"named 'rag'.*tool_use"):
        ChatTemplate.from_metadata(metadata, name="rag")
    with pytest.raises(MotleyError, match=r"tokenizer\.chat_template is not a string"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 7})


def test_the_tokens_of_the_file_reach_its_template() -> None:
    metadata = {
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}",
        PREFIX + "tokens": ["a", "<b>"],
        PREFIX + "bos_token_id": 1,
    }
    assert ChatTemplate.from_metadata(metadata).render([]) == "<b>"


def test_without_a_template_chatml_is_used_where_the_vocabulary_has_it() -> None:
    metadata = byte_level_metadata(special=[("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)])
    template = ChatTemplate.from_metadata(metadata)
    prompt = template.render([{"role": "user", "content": "Hi"}])
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.stops == ("<|im_end|>",)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.decode(tokenizer.encode(prompt), skip_special=False) == prompt


def test_without_any_template_roles_are_written_out_and_the_next_turn_stops_it() -> None:
    template = ChatTemplate.from_metadata(byte_level_metadata())
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "are you?"}]
    prompt = template.render([{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}])
    assert prompt == "System: Be kind.\n\nUser: How are you?\n\nAssistant:"
    assert "\nUser:" in template.stops
    assert template.render([{"role": "user", "content": "x"}], add_generation_prompt=False) == "User: x\n\n"
