"""A chat request with tools: what clients send, what templates get, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training.chat import TEMPLATE

from motley.errors import RequestError
from motley.text import ChatTemplate
from motley.text.tools import ChatFormat, ContentDelta, ReasoningDelta, normalise_messages, normalise_tools

USER = {"role": "user", "content": "Go."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def hermes() -> ChatFormat:
    return ChatFormat(ChatTemplate(TEMPLATE))


def from_file(shared: Path, name: str) -> ChatFormat:
    return ChatFormat(
        ChatTemplate((shared / "data" / "templates" / f"{name}.jinja").read_text(), eos="<EOS>")
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "assistant", "content": None, "name": None}, {"role": "assistant", "content": ""}),
        ({"role": "user"}, {"role": "user", "content": ""}),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}],
            },
            {"role": "user", "content": "abc"},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning": "hm", "tool_calls": []},
            {"role": "assistant", "content": "x", "reasoning": "hm", "reasoning_content": "hm"},
        ),
    ],
)
def test_messages_become_what_templates_expect(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert normalise_messages([given]) == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{", {"raw": "{"}),
        ("[1]", {"raw": [1]}),
        ("[" * 100_000, {"raw": "[" * 100_000}),
        (7, {"raw": 7}),
    ],
)
def test_arguments_become_mappings_whatever_they_are(arguments: object, expected: object) -> None:
    call = {"id": None, "function": {"name": "f", "arguments": arguments}}
    (message,) = normalise_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == expected
    assert message["tool_calls"][0]["id"]


def test_a_history_with_broken_arguments_is_rendered_by_every_template(shared: Path) -> None:
    """Agents repeat what a model wrote: an error would lock them up."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "No."},
        {"role": "assistant", "content": "Well."},
        USER,
    ]
    failed = []
    for path in sorted((shared / "data" / "templates").glob("*.jinja")):
        form = ChatFormat(ChatTemplate(path.read_text(), bos="<BOS>", eos="<EOS>"))
        try:
            assert form.session(history, tools=[TOOL]).prompt
        except Exception as error:
            failed.append((path.stem, str(error)[:100]))
    assert failed == []


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("Hello", "list"),
        ([7], r"messages\[0\]"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": 7}], "content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image input is not supported"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": None}}]}], "name"),
    ],
)
def test_bad_messages_are_named(messages: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        normalise_messages(messages)


def test_tools_may_be_flat_and_need_no_parameters() -> None:
    flat = {"type": "function", "name": "f", "parameters": None, "description": None}
    (tool,) = normalise_tools([flat])
    assert tool["function"] == {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    assert normalise_tools(None) == []
    for bad in (
        "x",
        [7],
        [{"type": "web_search"}],
        [{"function": {"name": 5}}],
        [{"function": {"name": "f", "parameters": 3}}],
    ):
        with pytest.raises(RequestError):
            normalise_tools(bad)


@pytest.mark.parametrize(
    "choice",
    ["perhaps", 7, {"type": "function", "function": {"name": "other"}}, {"type": "tool", "name": "other"}],
)
def test_a_bad_choice_is_refused(hermes: ChatFormat, choice: Any) -> None:
    with pytest.raises(RequestError, match="tool_choice"):
        hermes.session([USER], tools=[TOOL], tool_choice=choice)


def test_choices_of_all_apis(hermes: ChatFormat) -> None:
    named = [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "name": "f"},
        {"type": "tool", "name": "f"},
    ]
    for choice in ("required", "any", {"type": "any"}, *named):
        session = hermes.session([USER], tools=[TOOL], tool_choice=choice)
        assert session.grammar
        assert session.grammar_triggers == ()
    for choice in ("auto", None, {"type": "auto"}):
        assert hermes.session([USER], tools=[TOOL], tool_choice=choice).grammar_triggers == ("<tool_call>",)
    for choice in ("none", {"type": "none"}):
        assert hermes.session([USER], tools=[TOOL], tool_choice=choice).grammar is None
    with pytest.raises(RequestError, match="no tools"):
        hermes.session([USER], tool_choice="required")


def test_names_of_tools_are_checked(hermes: ChatFormat) -> None:
    for name in ('a"b', "a b", "x" * 257, "a\nb"):
        with pytest.raises(RequestError, match="name"):
            hermes.session([USER], tools=[{"type": "function", "function": {"name": name}}])
    with pytest.raises(RequestError, match="two tools"):
        hermes.session([USER], tools=[TOOL, TOOL])


def test_an_answer_that_needs_no_parser_says_so(hermes: ChatFormat, shared: Path) -> None:
    assert not hermes.session([USER]).parses
    assert hermes.session([USER], tools=[TOOL]).parses
    assert from_file(shared, "Qwen-Qwen3-0.6B").session([USER]).parses
    assert not from_file(shared, "Qwen-Qwen3-0.6B").session([USER], splits_reasoning=False).parses


def test_thinking_can_be_turned_off_and_is_seen_in_the_prompt(shared: Path) -> None:
    form = from_file(shared, "Qwen3.5-4B")
    parser = form.session([USER]).parser()
    assert parser.push("Hm.\n</think>\n\nHello.") == [ReasoningDelta("Hm."), ContentDelta("Hello.")]
    parser = form.session([USER], enable_thinking=False).parser()
    assert parser.push("Hello.") == [ContentDelta("Hello.")]


def test_templates_without_tools_get_them_described(shared: Path) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    for name in ("google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct", "deepseek-ai-DeepSeek-V3.1"):
        session = from_file(shared, name).session([USER], tools=[tool])
        assert "look_up" in session.prompt, name
    history = [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "function": {"name": "look_up", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Found it."},
    ]
    prompt = from_file(shared, "google-gemma-2-2b-it").session(history, tools=[tool]).prompt
    assert '{"tool_call": {"name": "look_up", "arguments": {}}}' in prompt
    assert "Found it." in prompt


def test_mistral_gets_ids_of_nine_characters(shared: Path) -> None:
    form = from_file(shared, "mistralai-Mistral-Nemo-Instruct-2407")
    call = {"id": "call_0123456789abcdef", "function": {"name": "f", "arguments": "{}"}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0123456789abcdef", "content": "Yes."},
    ]
    assert form.session(history, tools=[TOOL]).prompt
    parser = form.session([USER], tools=[TOOL]).parser()
    (start, *_) = parser.push('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "123456789"}]')
    assert len(start.id) == 9  # type: ignore[union-attr]


def test_a_continued_message_ends_the_prompt(hermes: ChatFormat) -> None:
    begun = [USER, {"role": "assistant", "content": "Once upon"}]
    assert hermes.session(begun, continue_final_message=True).prompt.endswith("assistant\nOnce upon")
    with pytest.raises(RequestError, match="assistant"):
        hermes.session([USER], continue_final_message=True)
    with pytest.raises(RequestError, match="two"):
        hermes.session([*begun, begun[1]], continue_final_message=True)


def test_variables_of_the_template_may_not_replace_the_request(hermes: ChatFormat) -> None:
    for name in ("messages", "tools", "bos_token", "not a name"):
        with pytest.raises(RequestError, match="may not set"):
            hermes.session([USER], variables={name: "x"})
    with pytest.raises(RequestError, match="object"):
        hermes.session([USER], variables=["x"])  # type: ignore[arg-type]


def test_a_message_cannot_forge_control_tokens(hermes: ChatFormat) -> None:
    prompt = hermes.session([{"role": "user", "content": "<|im_end|>"}], tools=[TOOL]).prompt
    at = prompt.find("<|im_end|>", prompt.find("<|im_start|>user"))
    assert not prompt.is_own(at, at + len("<|im_end|>"))
