"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from motley.server.api.anthropic_input import to_openai
from motley.server.api.chat import chat_jobs, chat_sampling, new_parser, read_answer
from motley.server.chat import ChatPrompt, read_chat
from motley.server.errors import ApiError
from motley.server.fields import Fields
from motley.server.front import Front, new_id
from motley.server.jobs import End, Piece, Progress
from motley.server.jobs import Event as JobEvent
from motley.server.replies import JSON, Answer, Run, answers_of, event
from motley.server.streams import stream_of
from motley.text.tools import CallStart, ContentDelta, Event, ParsedAnswer, ReasoningDelta


def _in_their_form(
    handle: Callable[[Front, Request], Awaitable[Response]],
) -> Callable[[Front, Request], Awaitable[Response]]:
    """Errors as Anthropic's clients expect them."""

    async def handled(front: Front, request: Request) -> Response:
        try:
            return await handle(front, request)
        except ApiError as error:
            return JSON(_error(error), error.status, error.headers)

    return handled


def _error(error: ApiError) -> dict[str, Any]:
    return {"type": "error", **error.body()}


@_in_their_form
async def create(front: Front, request: Request) -> Response:
    body = await front.body(request)
    translated = Fields(to_openai(body))
    chat = await read_chat(translated, front.model, front.settings, n_ctx=front.n_ctx)
    sampling = await chat_sampling(front, translated, chat)
    jobs = chat_jobs(front, translated, chat, sampling)
    if body.flag("stream"):
        writer = _Writer(front, chat)
        return await stream_of(
            request,
            front.engine,
            jobs,
            writer,
            on_error=lambda error: event(_error(error), "error"),
        )
    (answer,) = await answers_of(request, front.engine, jobs)
    return JSON(_message(front, answer, read_answer(new_parser(chat)(), answer.text)))


@_in_their_form
async def count_tokens(front: Front, request: Request) -> Response:
    body = await front.body(request)
    chat = await read_chat(Fields(to_openai(body)), front.model, front.settings)
    return JSON({"input_tokens": len(chat.tokens)})


def _message(front: Front, answer: Answer, parsed: ParsedAnswer) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    if parsed.reasoning:
        blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    if parsed.content or not (parsed.calls or parsed.reasoning):
        blocks.append({"type": "text", "text": parsed.content})
    for call in parsed.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "content": blocks,
        "model": front.settings.model_name,
        "stop_reason": _stop_reason(answer.end, bool(parsed.calls)),
        "stop_sequence": answer.end.stop,
        "usage": _usage(answer.end),
    }


def _input(arguments: str) -> Any:
    """Arguments as an object; a call that was cut off has none."""
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _stop_reason(end: End, has_calls: bool) -> str:
    if end.reason == "length":
        return "max_tokens"
    if has_calls:
        return "tool_use"
    return "end_turn" if end.stop is None else "stop_sequence"


def _usage(end: End) -> dict[str, Any]:
    return {
        "input_tokens": end.n_prompt - end.n_cached,
        "cache_read_input_tokens": end.n_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": end.n_new,
    }


class _Writer:
    """Writes an answer as events: blocks with running numbers, each opened, filled and closed."""

    def __init__(self, front: Front, chat: ChatPrompt) -> None:
        self._front = front
        self._chat = chat
        self._parser = new_parser(chat)()
        self._index = -1  # of the open block
        self._kind: str | None = None

    def begin(self, run: Run) -> bytes:
        return self._start()

    def write(self, events: list[JobEvent]) -> bytes:
        out: list[bytes] = []
        for each in events:
            if isinstance(each, Piece):
                out += self._write(self._parser.push(each.text))
            elif isinstance(each, Progress):
                out.append(event({"type": "ping"}, "ping"))
            else:
                out += self._write(self._parser.finish())
                out += self._end(each)
        return b"".join(out)

    def end(self) -> bytes:
        return b""

    def _start(self) -> bytes:
        message: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._front.settings.model_name,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(self._chat.tokens),
                "cache_read_input_tokens": 0,
                "cache_creation_input_tokens": 0,
                "output_tokens": 0,
            },
        }
        return event({"type": "message_start", "message": message}, "message_start")

    def _write(self, deltas: list[Event]) -> list[bytes]:
        out: list[bytes] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                out += self._open("text", {"type": "text", "text": ""})
                out.append(self._delta({"type": "text_delta", "text": delta.text}))
            elif isinstance(delta, ReasoningDelta):
                out += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                out.append(self._delta({"type": "thinking_delta", "thinking": delta.text}))
            elif isinstance(delta, CallStart):
                out += self._close()
                block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
                out += self._open("tool_use", block)
            else:
                out.append(self._delta({"type": "input_json_delta", "partial_json": delta.text}))
        return out

    def _open(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        """Begins a block, unless one of its kind is open."""
        if self._kind == kind:
            return []
        out = self._close()
        self._index += 1
        self._kind = kind
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*out, event(start, "content_block_start")]

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        out = []
        if self._kind == "thinking":
            out.append(self._delta({"type": "signature_delta", "signature": ""}))
        self._kind = None
        out.append(event({"type": "content_block_stop", "index": self._index}, "content_block_stop"))
        return out

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event(
            {"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta"
        )

    def _end(self, end: End) -> list[bytes]:
        out = [] if self._index >= 0 else self._open("text", {"type": "text", "text": ""})
        out += self._close()
        stop = {"stop_reason": _stop_reason(end, self._parser.has_calls), "stop_sequence": end.stop}
        out.append(event({"type": "message_delta", "delta": stop, "usage": _usage(end)}, "message_delta"))
        out.append(event({"type": "message_stop"}, "message_stop"))
        return out
