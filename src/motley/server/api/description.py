"""GET /openapi.json: the API's own description (OpenAPI 3.1), which /docs shows. Made from the routes: each must be
described here.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from motley import __version__
from motley.server.front import Front
from motley.server.replies import JSON

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_INT: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_IDS: Schema = {"type": "array", "items": _INT}


def _described(schema: Schema, text: str) -> Schema:
    return schema | {"description": text}


_EFFORT: Schema = {
    "n_expert_used": _described(_INT, "experts for each token"),
    "n_layer_exit": _described(_INT, "layers to run"),
}
_SAMPLING: Schema = {
    "temperature": _described(_NUMBER, "0: always the likeliest token"),
    "top_k": _INT,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "seed": _INT,
    "stop": _described({}, "a string or a list of strings"),
    "stream": _described(_FLAG, "server-sent events"),
    "logit_bias": _described({}, '{"id": x} or [[id or text, x or false]]'),
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repeat_penalty": _NUMBER,
    "json_schema": _described(_OBJECT, "the answer matches it"),
    "grammar": _described(_TEXT, "GBNF or Lark; the answer matches it"),
    "regex": _described(_TEXT, "the answer matches it"),
    "min_tokens": _INT,
    "ignore_eos": _FLAG,
    "speculative": _described(_TEXT, "off, auto, or drafters separated by commas"),
    "draft_max": _described(_INT, "the most tokens of a draft"),
    **_EFFORT,
    "cache_prompt": _FLAG,
    "cache_salt": _described(_TEXT, "prefixes are shared only with requests of the same salt"),
    "t_max_predict_ms": _described(_NUMBER, "the answer ends after so long"),
}
_OPENAI: Schema = {
    "model": _described(_TEXT, "any name; there is one model"),
    "max_tokens": _INT,
    "n": _described(_INT, "choices"),
    "stream_options": _described(_OBJECT, '{"include_usage": true}'),
    **_SAMPLING,
}
_CHAT: Schema = {
    "messages": _described(_OBJECTS, "each with a role and content"),
    "tools": _OBJECTS,
    "tool_choice": _described({}, "auto, none, required, or a function by name"),
    "parallel_tool_calls": _FLAG,
    "response_format": _described(_OBJECT, "text, json_object or json_schema"),
    "logprobs": _FLAG,
    "top_logprobs": _described(_INT, "0 to 20"),
    "reasoning_effort": _TEXT,
    "chat_template_kwargs": _OBJECT,
    **_OPENAI,
}
_PROMPT: Schema = _described({}, "text, tokens, both mixed, or a list of these")
_COMPLETION: Schema = {
    "prompt": _PROMPT,
    "n_predict": _described(_INT, "-1: until the context is full"),
    "n_probs": _INT,
    "id_slot": _INT,
    "return_tokens": _FLAG,
    "return_progress": _FLAG,
    "timings_per_token": _FLAG,
    "response_fields": {"type": "array", "items": _TEXT},
    **_SAMPLING,
}

# By path, the first of each route: tag, summary, fields of the body, those that are required.
_OPERATIONS: dict[str, tuple[str, str, Schema, tuple[str, ...]]] = {
    "/v1/chat/completions": ("OpenAI", "Answer a conversation", _CHAT, ("messages",)),
    "/v1/completions": (
        "OpenAI",
        "Continue a text",
        {"prompt": _PROMPT, "logprobs": _INT, "echo": _FLAG, **_OPENAI},
        ("prompt",),
    ),
    "/v1/responses": (
        "OpenAI",
        "Answer, in the form of the Responses API; nothing is stored",
        {
            "input": _described({}, "text, or a list of items"),
            "instructions": _TEXT,
            "max_output_tokens": _INT,
            "tools": _OBJECTS,
            "text": _OBJECT,
            "reasoning": _OBJECT,
            **_SAMPLING,
        },
        ("input",),
    ),
    "/v1/embeddings": (
        "OpenAI",
        "Embeddings of texts, of length 1",
        {"input": _PROMPT, "encoding_format": _described(_TEXT, "float or base64"), **_EFFORT},
        ("input",),
    ),
    "/v1/models": ("OpenAI", "The model", {}, ()),
    "/v1/messages": (
        "Anthropic",
        "Answer a conversation",
        {
            "messages": _OBJECTS,
            "max_tokens": _INT,
            "system": _described({}, "text or blocks"),
            "stop_sequences": {"type": "array", "items": _TEXT},
            "tools": _OBJECTS,
            "tool_choice": _OBJECT,
            "thinking": _OBJECT,
            "temperature": _NUMBER,
            "top_k": _INT,
            "top_p": _NUMBER,
            "stream": _FLAG,
        },
        ("messages", "max_tokens"),
    ),
    "/v1/messages/count_tokens": (
        "Anthropic",
        "Count the tokens of a conversation",
        {"messages": _OBJECTS, "system": {}, "tools": _OBJECTS},
        ("messages",),
    ),
    "/completion": ("llama-server", "Continue a text", _COMPLETION, ("prompt",)),
    "/infill": (
        "llama-server",
        "Fill in the text between a prefix and a suffix",
        {"input_prefix": _TEXT, "input_suffix": _TEXT, "input_extra": _OBJECTS, **_COMPLETION},
        ("input_prefix", "input_suffix"),
    ),
    "/tokenize": (
        "llama-server",
        "Text to tokens",
        {"content": _TEXT, "add_special": _FLAG, "parse_special": _FLAG, "with_pieces": _FLAG},
        ("content",),
    ),
    "/detokenize": ("llama-server", "Tokens to text", {"tokens": _IDS}, ("tokens",)),
    "/apply-template": ("llama-server", "The prompt of a conversation", _CHAT, ("messages",)),
    "/chat/completions/input_tokens": (
        "llama-server",
        "Count the tokens of a conversation",
        _CHAT,
        ("messages",),
    ),
    "/embedding": (
        "llama-server",
        "Embeddings of texts, with --pooling none of each token",
        {"content": _PROMPT, **_EFFORT},
        ("content",),
    ),
    "/health": ("State", "200 when the model is loaded; 503 with progress before that", {}, ()),
    "/props": ("State", "Settings, the chat template, the context of a request", {}, ()),
    "/slots": ("State", "Requests that run", {}, ()),
    "/slots/{slot}": (
        "State",
        "Save, restore or erase the cache of a slot: ?action=save|restore|erase",
        {"filename": _described(_TEXT, "a name, not a path")},
        (),
    ),
    "/metrics": ("State", "Counters for Prometheus, with --metrics", {}, ()),
    "/motley/live": ("State", "Devices, cache, requests and rates, twice a second, as events", {}, ()),
    "/openapi.json": ("State", "This description", {}, ()),
}


async def describe(front: Front, request: Request) -> Response:
    from motley.server.api import ROUTES

    return JSON(openapi([(method, paths) for method, paths, _ in ROUTES]))


def openapi(routes: list[tuple[str, tuple[str, ...]]]) -> dict[str, Any]:
    """The document for these routes: (method, paths)."""
    described: dict[str, Any] = {}
    for method, (path, *others) in routes:
        described[path] = {method.lower(): _operation(method, path, others)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Motley",
            "version": __version__,
            "description": "One model over HTTP, with the APIs of OpenAI, Anthropic and llama-server.",
        },
        "paths": described,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _operation(method: str, path: str, others: list[str]) -> dict[str, Any]:
    tag, summary, fields, required = _OPERATIONS[path]
    operation: dict[str, Any] = {
        "tags": [tag],
        "summary": summary,
        "operationId": re.sub(r"\W+", "_", f"{method} {path}").strip("_").lower(),
        "responses": {
            "200": {"description": "OK"},
            "default": {"description": 'An error: {"error": {"message", "type", "code"}}'},
        },
    }
    if others:
        operation["description"] = "Also " + ", ".join(others)
    if "{" in path:
        names = re.findall(r"{(\w+)}", path)
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ]
    if method == "POST":
        schema: Schema = {"type": "object", "properties": fields}
        if required:
            schema["required"] = list(required)
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return operation
