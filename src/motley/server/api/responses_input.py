"""OpenAI's Responses → chat completions."""

from __future__ import annotations

from typing import Any

from motley.server.errors import invalid, not_supported
from motley.server.fields import Fields, show


def to_chat(body: Fields) -> dict[str, Any]:
    """The request as fields of a chat completion."""
    for name in ("previous_response_id", "conversation"):
        if body.raw(name):
            raise not_supported(f"{name}: this server keeps no conversations; send all items as input")
    if body.flag("background"):
        raise not_supported("background: this server keeps no responses")
    translated = {
        name: value
        for name, value in body.values.items()
        if name not in ("input", "instructions", "text", "reasoning", "max_output_tokens", "store")
    }
    translated["messages"] = _messages(body)
    translated["max_tokens"] = body.integer("max_output_tokens")
    translated["tools"] = _tools(body.items("tools"))
    translated["tool_choice"] = _choice(body.raw("tool_choice"))
    translated |= _format(body.mapping("text"))
    if isinstance(effort := (body.mapping("reasoning") or {}).get("effort"), str):
        translated["reasoning_effort"] = effort
    if (n_top := body.integer("top_logprobs")) is not None:
        translated |= {"logprobs": n_top > 0, "top_logprobs": n_top}
    return translated


def _messages(body: Fields) -> list[dict[str, Any]]:
    given = body.raw("input")
    if given is None:
        raise invalid("input is missing", param="input")
    messages: list[dict[str, Any]] = []
    if instructions := body.text("instructions"):
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise invalid(f"input must be text or a list of items, not {show(given)}", param="input")
    for index, item in enumerate(given):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Thoughts and calls of one turn are items of their own: they belong to one message."""
    if not isinstance(item, dict):
        raise invalid(f"{where} must be an object, not {show(item)}", param="input")
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role == "assistant" and _is_open(messages):
                messages[-1]["content"] = item.get("content")
            else:
                messages.append({"role": role, "content": item.get("content")})
        case "reasoning":
            texts = [part.get("text", "") for part in item.get("content") or () if isinstance(part, dict)]
            messages.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(texts)})
        case "function_call":
            if not messages or messages[-1].get("role") != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case kind:
            raise invalid(f"{where}: items of type {show(kind)} are not supported", param="input")


def _is_open(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message has only thoughts so far."""
    last = messages[-1] if messages else {}
    return "reasoning_content" in last and not last.get("content") and "tool_calls" not in last


def _tools(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    """Functions; tools that OpenAI runs itself are left out."""
    if tools is None:
        return None
    if not all(isinstance(tool, dict) for tool in tools):
        raise invalid("tools must be a list of objects", param="tools")
    return [
        tool
        if "function" in tool
        else {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in tools
        if tool.get("type") == "function"
    ]


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(text: dict[str, Any] | None) -> dict[str, Any]:
    form = (text or {}).get("format")
    if not isinstance(form, dict) or form.get("type") in (None, "text"):
        return {}
    if form.get("type") == "json_schema":
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}
    return {"response_format": form}
