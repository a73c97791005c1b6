"""Messages as clients send them → messages as templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from motley.errors import RequestError

Message = Mapping[str, Any]


def normalise_messages(messages: object, *, has_text_arguments: bool = False) -> list[dict[str, Any]]:
    """Copies of the messages with what templates count on.

    Content is text: null becomes "", text parts are joined. The role "developer" becomes "system". Arguments of tool
    calls become mappings, or text where the template wants that; arguments that are no JSON (agents repeat what a model
    wrote) are passed as {"raw": text}. Fields that are null are left out.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            "messages must be a list", hint='for example [{"role": "user", "content": "Hello"}]'
        )
    return [_message(message, i, has_text_arguments) for i, message in enumerate(messages)]


def _message(message: object, i: int, has_text_arguments: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{i}] is not an object")
    made = {str(key): value for key, value in message.items() if value is not None}
    role = made.get("role")
    if not isinstance(role, str):
        raise RequestError(f"messages[{i}] has no role", hint="system, user, assistant or tool")
    made["role"] = "system" if role == "developer" else role
    made["content"] = _text(made.get("content", ""), i)
    if "reasoning" in made and "reasoning_content" not in made and isinstance(made["reasoning"], str):
        made["reasoning_content"] = made["reasoning"]
    calls = made.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise RequestError(f"messages[{i}].tool_calls is not a list")
        made["tool_calls"] = [_call(call, i, j, has_text_arguments) for j, call in enumerate(calls)]
    return made


def _text(content: object, i: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"messages[{i}].content is neither text nor a list of parts")
    return "".join(_part(part, i) for part in content)


def _part(part: object, i: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("image_url", "input_image", "image", "input_audio", "audio", "file", "video_url"):
        what = "image" if "image" in str(kind) else str(kind)
        raise RequestError(f"messages[{i}]: {what} input is not supported", hint="this model reads text only")
    if isinstance(part, Mapping):
        text = part.get("text", part.get("thinking", part.get("refusal", "")))
        if isinstance(text, str):
            return text
        if text is None:
            return ""
    raise RequestError(f"messages[{i}].content has a part that is no text")


def _call(call: object, i: int, j: int, has_text_arguments: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f"messages[{i}].tool_calls[{j}] has no function")
    name = function.get("name")
    if not isinstance(name, str):
        raise RequestError(f"messages[{i}].tool_calls[{j}].function has no name")
    arguments = arguments_mapping(function.get("arguments"))
    known = call.get("id")
    return {
        "id": known if isinstance(known, str) and known else f"call{j:05d}",
        "type": "function",
        "function": {
            "name": name,
            "arguments": json.dumps(arguments, ensure_ascii=False) if has_text_arguments else arguments,
        },
    }


def arguments_mapping(arguments: object) -> dict[str, Any]:
    """Arguments as a mapping, whatever a client sent for them."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return {str(key): value for key, value in arguments.items()}
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return {"raw": arguments}
        return value if isinstance(value, dict) else {"raw": value}
    return {"raw": arguments}


def normalise_tools(tools: object) -> list[dict[str, Any]]:
    """Tools as {"type": "function", "function": {name, description, parameters}}; the flat form is accepted too.

    Each has a description and each parameter too: some templates write them without asking.
    """
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError("tools must be a list")
    return [_tool(tool, i) for i, tool in enumerate(tools)]


def _tool(tool: object, i: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"tools[{i}] is not an object")
    function = tool.get("function")
    if function is None and "name" in tool:
        function = tool
    if not isinstance(function, Mapping) or tool.get("type", "function") not in ("function", "custom"):
        raise RequestError(
            f"tools[{i}] is not a function", hint='{"type": "function", "function": {"name": …}}'
        )
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"tools[{i}].function has no name")
    parameters = function.get("parameters", function.get("input_schema"))
    if parameters is None or parameters == {}:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise RequestError(f"tools[{i}].function.parameters is not a JSON schema")
    schema = dict(parameters)
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise RequestError(f"tools[{i}].function.parameters.properties is not an object")
    schema["properties"] = dict(properties)
    made = {k: v for k, v in function.items() if k in ("name", "description", "strict") and v is not None}
    made.setdefault("description", "")
    return {"type": "function", "function": {**made, "parameters": schema}}


def with_descriptions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools whose parameters all have a description, for templates that write it unasked."""
    made = []
    for tool in tools:
        function = tool["function"]
        schema = function["parameters"]
        properties = {
            key: {"description": "", **value} if isinstance(value, Mapping) else value
            for key, value in schema["properties"].items()
        }
        schema = {"required": [], **schema, "properties": properties}
        made.append({**tool, "function": {**function, "parameters": schema}})
    return made


def template_variables(source: str, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, object]:
    """Variables besides `messages` and `tools` that a few templates read."""
    variables: dict[str, object] = {}
    if "+ functions" in source:
        variables["functions"] = json.dumps([tool["function"] for tool in tools or ()], indent=4)
    if "date_string" in source:
        variables["date_string"] = datetime.now().strftime("%d %b %Y")
    if "+ datetime" in source:
        variables["datetime"] = datetime.now().strftime("%b %d %Y")
    return variables
