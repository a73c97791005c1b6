"""Messages → prompt: checked, rendered with tools and thoughts, tokenized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from motley.errors import MotleyError
from motley.server.errors import ApiError, invalid, of_motley
from motley.server.fields import Fields, show
from motley.server.model import FrontModel
from motley.server.prompts import require_chars
from motley.server.settings import ServerSettings
from motley.text.tools import ToolSession


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat."""

    session: ToolSession
    tokens: tuple[int, ...]
    has_prefill: bool = False  # the client gave the beginning of the answer

    @property
    def text(self) -> str:
        return str(self.session.prompt)


async def read_chat(
    body: Fields,
    model: FrontModel,
    settings: ServerSettings,
    *,
    n_ctx: int | None = None,
    messages: Any = None,
    tools: Any = None,
) -> ChatPrompt:
    """The prompt of a chat request. `messages`, `tools`: in OpenAI's form, if the body has another one. `n_ctx`: 400
    for a prompt that cannot fit.
    """
    clean = clean_messages(body.raw("messages") if messages is None else messages, settings)
    tools = body.raw("tools") if tools is None else tools
    continues = body.flag("continue_final_message")
    adds_prompt = body.flag("add_generation_prompt", not continues)
    if continues and adds_prompt:
        raise invalid("add_generation_prompt and continue_final_message exclude each other")
    is_answered = bool(clean) and clean[-1].get("role") == "assistant" and not clean[-1].get("tool_calls")
    has_prefill = is_answered and (adds_prompt or continues)
    variables, thinks = _read_variables(body, settings)
    n_chars = sum(len(str(message)) for message in clean) + len(str(tools))

    def render() -> ChatPrompt:
        session = model.chat_format.session(
            clean,
            tools=tools or None,
            tool_choice=body.raw("tool_choice"),
            parallel_tool_calls=body.raw("parallel_tool_calls"),
            enable_thinking=thinks,
            splits_reasoning=_splits_reasoning(body, settings),
            continue_final_message=has_prefill,
            add_generation_prompt=adds_prompt or has_prefill,
            variables=variables,
        )
        require_chars(len(session.prompt), model, n_ctx)
        return ChatPrompt(session, tuple(model.tokenizer.encode_marked(session.prompt)), has_prefill)

    try:
        return await model.in_thread_if_long(n_chars, render)
    except MotleyError as error:
        raise of_motley(error) from None


def clean_messages(messages: Any, settings: ServerSettings) -> list[dict[str, Any]]:
    """The messages, with text as content. An empty assistant's message at the end, as some clients send, is dropped."""
    if not isinstance(messages, list):
        raise invalid(f"messages must be a list, not {show(messages)}", param="messages")
    if len(messages) > settings.limits.n_messages:
        raise invalid(f"{len(messages)} messages; at most {settings.limits.n_messages}", param="messages")
    clean = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise invalid(f"{where} must be an object, not {show(message)}", param="messages")
        # As in llama-server: parts of a text that the model continues are paragraphs.
        is_last_word = index == len(messages) - 1 and message.get("role") == "assistant"
        content = text_of(message.get("content"), where, between="\n\n" if is_last_word else "\n")
        clean.append(
            {name: value for name, value in message.items() if value is not None} | {"content": content}
        )
    while clean and clean[-1].get("role") == "assistant" and not _has_substance(clean[-1]):
        clean.pop()
    return clean


def text_of(content: Any, where: str, *, between: str = "\n") -> str:
    """Content as text: a string, null, or parts of text with `between` between them."""
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
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("image_url", "image", "input_image"):
            raise ApiError(400, "image input is not supported by this model")
        elif kind in ("input_audio", "audio_url", "audio"):
            raise ApiError(400, "audio input is not supported by this model")
        elif kind not in ("refusal", "thinking", "reasoning"):
            raise invalid(f"{where}.content: unsupported part {show(part)}", param="messages")
    return between.join(texts)


def _has_substance(message: dict[str, Any]) -> bool:
    return bool(message["content"] or message.get("tool_calls") or message.get("reasoning_content"))


def _read_variables(body: Fields, settings: ServerSettings) -> tuple[dict[str, Any], bool]:
    """The template's variables, and whether the model shall think: it does, unless it is told not to."""
    variables = dict(body.mapping("chat_template_kwargs") or {})
    try:
        n_chars = len(orjson.dumps(variables))
    except orjson.JSONEncodeError:  # nested too deeply
        n_chars = settings.limits.kwargs_chars + 1
    if n_chars > settings.limits.kwargs_chars:
        raise invalid("chat_template_kwargs is too large", param="chat_template_kwargs")
    thinks: Any = variables.pop("enable_thinking", None)
    if isinstance(thinks, str):
        thinks = {"true": True, "false": False}.get(thinks.lower())
    if thinks is None and settings.reasoning != "auto":
        thinks = settings.reasoning == "on"
    effort = body.raw("reasoning_effort")
    if isinstance(effort, str):
        variables.setdefault("reasoning_effort", effort)
        if effort == "none" and thinks is None:
            thinks = False
    return variables, thinks is not False


def _splits_reasoning(body: Fields, settings: ServerSettings) -> bool:
    return (body.text("reasoning_format") or settings.reasoning_format) != "none"
