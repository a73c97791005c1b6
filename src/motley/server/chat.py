"""Messages → prompt: checked, brought into the form that templates expect, rendered and tokenized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from motley.errors import MotleyError
from motley.server.errors import ApiError, invalid, of_motley
from motley.server.fields import Fields, show
from motley.server.model import FrontModel
from motley.server.settings import ServerSettings
from motley.text.marked import MarkedText, join

_PREFILL = "an assistant's message at the end is continued; "
# Variables of a template that a request may not replace.
_RESERVED = {
    "messages",
    "tools",
    "add_generation_prompt",
    "tokenize",
    "chat_template",
    "bos_token",
    "eos_token",
}
# How thinking begins and ends, by what a template contains.
_THINKING = (
    ("<think>", "</think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
)


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat."""

    text: MarkedText
    tokens: tuple[int, ...]
    prefill: str = ""  # the beginning of the answer, which the client gave
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinks: bool = True  # whether the request lets the model think


async def read_chat(
    body: Fields, model: FrontModel, settings: ServerSettings, *, messages: Any = None, tools: Any = None
) -> ChatPrompt:
    """The prompt of a chat request. `messages`, `tools`: in OpenAI's form, if the body has another one."""
    given = body.raw("messages") if messages is None else messages
    clean = clean_messages(given, model, settings)
    tools = read_tools(body.raw("tools") if tools is None else tools, settings)
    kwargs = _read_kwargs(body, settings)
    prefill, continues = "", body.flag("continue_final_message")
    adds_prompt = body.flag("add_generation_prompt", not continues)
    if continues and adds_prompt:
        raise invalid("add_generation_prompt and continue_final_message exclude each other")
    if clean and clean[-1]["role"] == "assistant" and (adds_prompt or continues):
        if len(clean) > 1 and clean[-2]["role"] == "assistant":
            raise invalid(_PREFILL + "two of them cannot be", param="messages")
        if "tool_calls" not in clean[-1]:
            prefill, adds_prompt = clean.pop()["content"], True
    n_chars = sum(len(str(message)) for message in clean)

    def render() -> ChatPrompt:
        text = _render(model, clean, tools, adds_prompt, kwargs)
        if adds_prompt and kwargs.get("enable_thinking") is False:
            text = _close_thinking(text, model.template.source)
        if prefill:
            text = join("", [text, prefill])
        tokens = model.tokenizer.encode_marked(text)
        return ChatPrompt(
            text, tuple(tokens), prefill, tools or [], kwargs.get("enable_thinking") is not False
        )

    try:
        return await model.in_thread_if_long(n_chars, render)
    except MotleyError as error:
        raise of_motley(error) from None


def clean_messages(messages: Any, model: FrontModel, settings: ServerSettings) -> list[dict[str, Any]]:
    """The messages, checked, with text as content. An empty assistant's message at the end is dropped."""
    if not isinstance(messages, list):
        raise invalid(f"messages must be a list, not {show(messages)}", param="messages")
    if len(messages) > settings.limits.n_messages:
        raise invalid(f"{len(messages)} messages; at most {settings.limits.n_messages}", param="messages")
    clean = [_clean_message(message, index, model) for index, message in enumerate(messages)]
    while clean and clean[-1]["role"] == "assistant" and not clean[-1]["content"] and len(clean[-1]) == 2:
        clean.pop()
    return clean


def read_tools(tools: Any, settings: ServerSettings) -> list[dict[str, Any]] | None:
    """The tools in OpenAI's form; None for an empty list, because templates test for it."""
    if not tools:
        return None
    if not isinstance(tools, list) or len(tools) > settings.limits.n_tools:
        raise invalid(f"tools must be a list of at most {settings.limits.n_tools}", param="tools")
    clean = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise invalid(f"tools[{index}] has no function with a name", param="tools")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise invalid(f"tools[{index}].function.parameters must be an object", param="tools")
        clean.append(
            {
                "type": "function",
                "function": {
                    "name": function["name"],
                    "description": function.get("description") or "",
                    "parameters": parameters or {"type": "object", "properties": {}},
                },
            }
        )
    return clean


def text_of(content: Any, where: str) -> str:
    """Content as text: a string, null, or parts of text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(
            f"{where}.content must be text or a list of parts, not {show(content)}", param="messages"
        )
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("image_url", "image", "input_image"):
            raise ApiError(400, "image input is not supported by this model")
        elif kind in ("input_audio", "audio_url"):
            raise ApiError(400, "audio input is not supported by this model")
        elif kind in ("refusal", "thinking", "reasoning"):
            continue
        else:
            raise invalid(f"{where}.content: unsupported part {show(part)}", param="messages")
    return "\n".join(texts)


def _clean_message(message: Any, index: int, model: FrontModel) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object, not {show(message)}", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{where}.role must be a string, not {show(role)}", param="messages")
    if role == "developer" and "developer" not in model.template.source:
        role = "system"
    clean: dict[str, Any] = {"role": role, "content": text_of(message.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            clean[name] = message[name]
    if calls := message.get("tool_calls"):
        clean["tool_calls"] = _clean_calls(calls, where)
    return clean


def _clean_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls must be a list", param="messages")
    clean = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{where}.tool_calls[{number}] has no function with a name", param="messages")
        clean.append(
            {
                "id": call.get("id") if isinstance(call.get("id"), str) else f"call_{number}",
                "type": "function",
                "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"))},
            }
        )
    return clean


def _arguments(arguments: Any) -> Any:
    """Arguments as an object, which most templates expect. Agents also send broken JSON back: it stays text."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _read_kwargs(body: Fields, settings: ServerSettings) -> dict[str, Any]:
    kwargs = dict(body.mapping("chat_template_kwargs") or {})
    if len(orjson.dumps(kwargs)) > settings.limits.kwargs_chars:
        raise invalid("chat_template_kwargs is too large", param="chat_template_kwargs")
    if forbidden := _RESERVED & kwargs.keys():
        raise invalid(f"chat_template_kwargs may not set {min(forbidden)}", param="chat_template_kwargs")
    if settings.reasoning != "auto":
        kwargs.setdefault("enable_thinking", settings.reasoning == "on")
    effort = body.raw("reasoning_effort")
    if isinstance(effort, str):
        kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return kwargs


def _render(
    model: FrontModel,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    adds_prompt: bool,
    kwargs: Mapping[str, Any],
) -> MarkedText:
    return model.template.render_marked(messages, add_generation_prompt=adds_prompt, tools=tools, **kwargs)


def _close_thinking(text: MarkedText, source: str) -> MarkedText:
    """A template that does not know `enable_thinking` may have opened the thoughts: they are closed at once."""
    for begins, ends in _THINKING:
        if str(text).rstrip().endswith(begins):
            return text + MarkedText(ends, "t" * len(ends))
        if begins in source and "enable_thinking" not in source and begins != "<think>":
            return text + MarkedText(begins + ends, "t" * len(begins + ends))
    return text
