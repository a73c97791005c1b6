"""/tokenize, /detokenize, /apply-template, /chat/completions/input_tokens."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from motley.server.chat import read_chat
from motley.server.errors import invalid
from motley.server.front import Front
from motley.server.prompts import encode, read_prompt
from motley.server.replies import JSON


async def tokenize(front: Front, request: Request) -> Response:
    body = await front.body(request)
    model, content = front.model, body.raw("content")
    adds, parses = body.flag("add_special"), body.flag("parse_special", True)
    if content is None or content == "":
        tokens: list[int] = []
    elif isinstance(content, str):
        tokens = await encode(content, model, add_special=adds, parse_special=parses)
    else:
        tokens = await read_prompt(content, model, where="content")
    if not body.flag("with_pieces"):
        return JSON({"tokens": tokens})

    def pieces() -> Response:
        return JSON({"tokens": [{"id": token, "piece": _piece(front, token)} for token in tokens]})

    return await model.in_thread_if_long(len(tokens), pieces)


async def detokenize(front: Front, request: Request) -> Response:
    body = await front.body(request)
    tokens, model = body.items("tokens") or [], front.model
    n_vocab = model.tokenizer.n_vocab

    def text() -> str:
        if not n_vocab:
            raise invalid("this model file has no tokenizer, so its tokens have no text")
        if not all(type(token) is int and 0 <= token < n_vocab for token in tokens):
            raise invalid(f"tokens must be numbers from 0 to {n_vocab - 1}", param="tokens")
        return model.show(tokens)

    return JSON({"content": await model.in_thread_if_long(len(tokens), text)})


async def apply_template(front: Front, request: Request) -> Response:
    body = await front.body(request)
    chat = await read_chat(body, front.model, front.settings)
    return JSON({"prompt": str(chat.text)})


async def count_chat(front: Front, request: Request) -> Response:
    body = await front.body(request)
    chat = await read_chat(body, front.model, front.settings)
    return JSON({"input_tokens": len(chat.tokens)})


def _piece(front: Front, token: int) -> Any:
    """Text, or bytes if they are not whole characters."""
    data = front.model.tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
