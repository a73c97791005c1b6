"""Anthropic's messages → OpenAI's."""

from __future__ import annotations

from typing import Any

import orjson

from motley.server.errors import ApiError, invalid
from motley.server.fields import Fields, show

# Claude Code puts this line with a new number first into `system`; with it no prompt would ever be found in the cache.
_NONCE = "x-anthropic-billing-header"
_NO_IMAGES = "image input is not supported by this model"


def to_openai(body: Fields) -> dict[str, Any]:
    """The request as fields of a chat completion."""
    messages = body.raw("messages")
    if not isinstance(messages, list):
        raise invalid(f"messages must be a list, not {show(messages)}", param="messages")
    translated: dict[str, Any] = {
        name: value for name, value in body.values.items() if name not in ("system", "thinking", "metadata")
    }
    translated["messages"] = _system(body.raw("system")) + [
        made for index, message in enumerate(messages) for made in _message(message, f"messages[{index}]")
    ]
    translated["tools"] = _tools(body.raw("tools"))
    translated |= _choice(body.mapping("tool_choice"))
    translated["stop"] = body.raw("stop_sequences", "stop")
    thinking = body.mapping("thinking")
    if thinking is not None and thinking.get("type") in ("enabled", "disabled"):
        variables = dict(body.mapping("chat_template_kwargs") or {})
        variables.setdefault("enable_thinking", thinking["type"] == "enabled")
        translated["chat_template_kwargs"] = variables
    translated |= _format(body)
    return translated


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None:
        return []
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list):
        raise invalid("system must be text or a list of blocks", param="system")
    texts = [_text(block, "system") for block in blocks]
    text = "\n".join(text for text in texts if not text.startswith(_NONCE))
    return [{"role": "system", "content": text}] if text else []


def _message(message: Any, where: str) -> list[dict[str, Any]]:
    """One message becomes several: results of tools have a role of their own."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid(f"{where} must have a role", param="messages")
    role, content = message["role"], message.get("content")
    if content is None or isinstance(content, str):
        return [{"role": role, "content": content or ""}]
    if not isinstance(content, list):
        raise invalid(f"{where}.content must be text or a list of blocks", param="messages")
    texts, thoughts, calls, results = [], [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        match kind:
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                continue
            case "tool_use" | "server_tool_use":
                calls.append(_call(block, where))
            case "tool_result":
                results.append(_result(block, where))
            case _:
                texts.append(_text(block, where))
    made: list[dict[str, Any]] = list(results)
    if texts or calls or thoughts or not results:
        said: dict[str, Any] = {"role": role, "content": "".join(texts)}
        if thoughts:
            said["reasoning_content"] = "\n".join(thoughts)
        if calls:
            said["tool_calls"] = calls
        made.append(said)
    return made


def _text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind == "image":
        raise ApiError(400, _NO_IMAGES)
    source = block.get("source") if kind == "document" else None
    if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    raise invalid(f"{where}: unsupported block {show(block)}", param="messages")


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise invalid(f"{where}: a tool_use without a name", param="messages")
    arguments = orjson.dumps(block.get("input") or {}).decode()
    function = {"name": block["name"], "arguments": arguments}
    return {"id": str(block.get("id") or ""), "type": "function", "function": function}


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    if content is not None and not isinstance(content, str):
        if not isinstance(content, list):
            raise invalid(f"{where}: the content of a tool_result must be text or blocks", param="messages")
        content = "\n".join(_text(part, where) for part in content)
    text = content or ""
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": text}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools with a schema. Those that Anthropic runs itself, such as web search, have none and are left out."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid("tools must be a list of objects", param="tools")
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool["input_schema"],
            },
        }
        for tool in tools
        if tool.get("input_schema") is not None
    ]


def _choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {"tool_choice": None}
    translated: dict[str, Any] = {"parallel_tool_calls": not choice.get("disable_parallel_tool_use")}
    match choice.get("type"):
        case "auto" | "none" as kind:
            translated["tool_choice"] = kind
        case "any":
            translated["tool_choice"] = "required"
        case "tool":
            translated["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        case _:
            raise invalid("tool_choice.type must be auto, any, tool or none", param="tool_choice")
    return translated


def _format(body: Fields) -> dict[str, Any]:
    """Structured outputs: `output_config.format`, or `output_format`."""
    form = body.mapping("output_format") or (body.mapping("output_config") or {}).get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return {}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}
