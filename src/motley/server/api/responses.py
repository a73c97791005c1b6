"""POST /v1/responses: OpenAI's newer API, without stored conversations."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from motley.server.api.chat import chat_jobs, chat_sampling, new_parser, read_answer
from motley.server.api.llama import show_progress
from motley.server.api.responses_input import to_chat
from motley.server.chat import ChatPrompt, read_chat
from motley.server.fields import Fields
from motley.server.front import Front, new_id
from motley.server.jobs import End, Piece, Progress
from motley.server.jobs import Event as JobEvent
from motley.server.replies import JSON, Run, answers_of, event
from motley.server.shape import LiveTimings, timings
from motley.server.streams import stream_of
from motley.text.tools import ArgumentsDelta, CallStart, ContentDelta, Event, ParsedAnswer, ReasoningDelta


async def create(front: Front, request: Request) -> Response:
    body = await front.body(request)
    translated = Fields(to_chat(body))
    chat = await read_chat(translated, front.model, front.settings, n_ctx=front.n_ctx)
    sampling = await chat_sampling(front, translated, chat)
    jobs = chat_jobs(front, translated, chat, sampling)
    shape = _Shape(front, body)
    if body.flag("stream"):
        writer = _Writer(shape, body, chat)
        return await stream_of(
            request,
            front.engine,
            jobs,
            writer,
            on_error=lambda error: event({"type": "error", **error.body()["error"]}, "error"),
        )
    (answer,) = await answers_of(request, front.engine, jobs)
    items = _items(read_answer(new_parser(chat)(), answer.text))
    return JSON(shape.response(items, answer.end) | {"timings": timings(answer.end)})


class _Shape:
    """The response object."""

    def __init__(self, front: Front, body: Fields) -> None:
        self._body = body
        self._model = front.settings.model_name
        self._id = new_id("resp_")
        self._created = int(time.time())

    def response(self, items: list[dict[str, Any]], end: End | None = None) -> dict[str, Any]:
        """`end` None: it is in progress."""
        body = self._body.values
        is_cut = end is not None and end.reason == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None if end is None else int(time.time()),
            "status": "in_progress" if end is None else "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "model": self._model,
            "output": items,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": body.get("temperature"),
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "truncation": "disabled",
            "metadata": body.get("metadata") or {},
            "usage": None if end is None else _usage(end),
        }


def _usage(end: End) -> dict[str, Any]:
    return {
        "input_tokens": end.n_prompt,
        "input_tokens_details": {"cached_tokens": end.n_cached},
        "output_tokens": end.n_new,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.n_prompt + end.n_new,
    }


def _items(answer: ParsedAnswer) -> list[dict[str, Any]]:
    items = []
    if answer.reasoning:
        items.append(_thoughts(new_id("rs_"), answer.reasoning))
    if answer.content or not answer.calls:
        items.append(_said(new_id("msg_"), answer.content))
    items += [_call(new_id("fc_"), call.id, call.name, call.arguments) for call in answer.calls]
    return items


def _thoughts(number: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": number, "type": "reasoning", "summary": [], "content": content, "status": status}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _said(number: str, text: str, status: str = "completed", *, is_empty: bool = False) -> dict[str, Any]:
    content = [] if is_empty else [_part(text)]
    return {"id": number, "type": "message", "role": "assistant", "status": status, "content": content}


def _call(number: str, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    return {
        "id": number,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


class _Writer:
    """Writes an answer as events: items with running numbers, each opened, filled and closed."""

    def __init__(self, shape: _Shape, body: Fields, chat: ChatPrompt) -> None:
        self._shape = shape
        self._parser = new_parser(chat)()
        self._has_timings = body.flag("timings_per_token")
        self._live = LiveTimings()
        self._items: list[dict[str, Any]] = []  # complete ones
        self._n_events = 0
        self._kind: str | None = None  # of the open item
        self._number = self._call_id = self._name = ""
        self._text = ""

    def begin(self, run: Run) -> bytes:
        created = self._event("response.created", response=self._shape.response([]))
        return created + self._event("response.in_progress", response=self._shape.response([]))

    def write(self, events: list[JobEvent]) -> bytes:
        out: list[bytes] = []
        for each in events:
            if isinstance(each, Piece):
                self._live.tokens(len(each.tokens))
                out += self._write(self._parser.push(each.text))
            elif isinstance(each, Progress):
                self._live.progress(each.n_cached, each.n_processed, each.seconds)
                out.append(
                    self._event(
                        "response.in_progress",
                        response=self._shape.response([]),
                        prompt_progress=show_progress(each),
                    )
                )
            else:
                out += self._write(self._parser.finish())
                out += self._end(each)
        return b"".join(out)

    def end(self) -> bytes:
        return b""

    def _write(self, deltas: list[Event]) -> list[bytes]:
        out: list[bytes] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                out += self._open("message")
                out.append(
                    self._delta("response.output_text.delta", delta.text, content_index=0, logprobs=[])
                )
            elif isinstance(delta, ReasoningDelta):
                out += self._open("reasoning")
                out.append(self._delta("response.reasoning_text.delta", delta.text, content_index=0))
            elif isinstance(delta, CallStart):
                out += self._close()
                self._call_id, self._name = delta.id, delta.name
                out += self._open("function_call")
            else:
                assert isinstance(delta, ArgumentsDelta)
                out.append(self._delta("response.function_call_arguments.delta", delta.text))
        return out

    def _open(self, kind: str) -> list[bytes]:
        if self._kind == kind:
            return []
        out = self._close()
        prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[kind]
        self._kind, self._number, self._text = kind, new_id(prefix), ""
        out.append(
            self._event(
                "response.output_item.added",
                output_index=len(self._items),
                item=self._item("in_progress", is_empty=True),
            )
        )
        if kind == "message":
            out.append(self._on_item("response.content_part.added", content_index=0, part=_part("")))
        return out

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        out = []
        if self._kind == "message":
            out.append(
                self._on_item("response.output_text.done", content_index=0, text=self._text, logprobs=[])
            )
            out.append(self._on_item("response.content_part.done", content_index=0, part=_part(self._text)))
        elif self._kind == "reasoning":
            out.append(self._on_item("response.reasoning_text.done", content_index=0, text=self._text))
        else:
            out.append(
                self._on_item("response.function_call_arguments.done", name=self._name, arguments=self._text)
            )
        item = self._item("completed")
        out.append(self._event("response.output_item.done", output_index=len(self._items), item=item))
        self._items.append(item)
        self._kind = None
        return out

    def _item(self, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        if self._kind == "message":
            return _said(self._number, self._text, status, is_empty=is_empty)
        if self._kind == "reasoning":
            return _thoughts(self._number, self._text, status)
        return _call(self._number, self._call_id, self._name, self._text, status)

    def _delta(self, name: str, text: str, **more: Any) -> bytes:
        self._text += text
        if self._has_timings:
            more["timings"] = self._live.show()
        return self._on_item(name, delta=text, **more)

    def _on_item(self, name: str, /, **data: Any) -> bytes:
        return self._event(name, item_id=self._number, output_index=len(self._items), **data)

    def _event(self, name: str, /, **data: Any) -> bytes:
        self._n_events += 1
        return event({"type": name, "sequence_number": self._n_events - 1, **data}, name)

    def _end(self, end: End) -> list[bytes]:
        out = [] if self._items or self._kind else self._open("message")
        out += self._close()
        response = self._shape.response(self._items, end)
        out.append(self._event("response.completed", response=response, timings=timings(end)))
        return out
