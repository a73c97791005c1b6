"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from motley.server.api.llama import Shape as LlamaShape
from motley.server.api.llama import make_jobs, read_n, show_progress
from motley.server.chat import ChatPrompt, read_chat
from motley.server.constraints import after_thoughts, check, read_constraint
from motley.server.errors import invalid
from motley.server.fields import Fields
from motley.server.front import FINGERPRINT, Front, new_id
from motley.server.jobs import End, Job, Piece, Progress
from motley.server.jobs import Event as JobEvent
from motley.server.parts import PlainParser
from motley.server.replies import DONE, JSON, Answer, Run, answers_of
from motley.server.sampling import Sampling, read_sampling
from motley.server.shape import OPENAI_FINISH, LiveTimings, probabilities, timings, usage
from motley.server.streams import stream_of
from motley.text.tools import AnswerParser, CallStart, ContentDelta, Event, ParsedAnswer, ReasoningDelta

_NOTHING = b'""'  # the text of an empty chunk


async def complete(front: Front, request: Request) -> Response:
    body = await front.body(request)
    chat = await read_chat(body, front.model, front.settings, n_ctx=front.n_ctx)
    sampling = await chat_sampling(front, body, chat)
    jobs = chat_jobs(front, body, chat, sampling, read_n(body, front))
    shape = Shape(front, body, sampling, new_parser(chat))
    if body.flag("stream"):
        return await stream_of(request, front.engine, jobs, shape)
    answers = await answers_of(request, front.engine, jobs)
    return JSON(shape.complete(answers, jobs))


async def chat_sampling(front: Front, body: Fields, chat: ChatPrompt) -> Sampling:
    """The sampling of a chat request: also its `logprobs`, the template's stop strings, and the tools' grammar."""
    sampling = read_sampling(body, front.model, front.settings, n_probs=read_logprobs(body))
    session, params = chat.session, sampling.params
    own = read_constraint(body)
    if own and session.grammar is not None and not session.grammar_triggers:
        raise invalid("an answer cannot be a tool call and match another schema or grammar")
    if own and session.opens_reasoning is not None:
        none = dict.fromkeys(("json_schema", "grammar", "regex")) | {"json_object": False}
        params = replace(params, **{**none, **after_thoughts(own, session.opens_reasoning)})
    elif session.grammar is not None and not own:
        params = replace(params, grammar=session.grammar, grammar_triggers=session.grammar_triggers)
    params = params.with_stops(session.stops)
    await check(params)
    return replace(sampling, params=params)


def chat_jobs(
    front: Front, body: Fields, chat: ChatPrompt, sampling: Sampling, n_choices: int = 1
) -> list[Job]:
    return make_jobs(
        front,
        body,
        [chat.tokens],
        sampling,
        n_choices,
        continues_prompt=chat.has_prefill,
        shows_special=chat.session.shows_special,
    )


def read_logprobs(body: Fields) -> int:
    """OpenAI's `logprobs` and `top_logprobs`: how many of the likeliest tokens are wanted; 0: no probabilities."""
    if not body.flag("logprobs"):
        return 0
    n_top = body.integer("top_logprobs", 0) or 0
    if not 0 <= n_top <= 20:
        raise invalid("top_logprobs must be from 0 to 20", param="top_logprobs")
    return max(1, n_top)


def new_parser(chat: ChatPrompt) -> Callable[[], AnswerParser]:
    """Parsers for the answers; the plain one where there is nothing to parse."""
    return chat.session.parser if chat.session.parses else PlainParser


class Shape:
    """Answers in the form of chat completions."""

    def __init__(
        self, front: Front, body: Fields, sampling: Sampling, new_parser: Callable[[], AnswerParser]
    ) -> None:
        self._front = front
        self._body = body
        self._sampling = sampling
        self._new_parser = new_parser
        self._id = new_id("chatcmpl-")
        self._created = int(time.time())
        self._is_verbose = body.flag("verbose") or front.settings.is_verbose
        options = body.mapping("stream_options") or {}
        self._has_usage = bool(options.get("include_usage"))
        self._has_timings = body.flag("timings_per_token")
        self._tail = orjson.dumps(
            {
                "created": self._created,
                "id": self._id,
                "model": front.settings.model_name,
                "system_fingerprint": FINGERPRINT,
                "object": "chat.completion.chunk",
            }
        )[1:]

    # At once

    def complete(self, answers: list[Answer], jobs: list[Any]) -> dict[str, Any]:
        ends = [answer.end for answer in answers]
        result: dict[str, Any] = {
            "choices": [self._choice(answer, index) for index, answer in enumerate(answers)],
            "created": self._created,
            "model": self._front.settings.model_name,
            "system_fingerprint": FINGERPRINT,
            "object": "chat.completion",
            "usage": usage(ends),
            "id": self._id,
            "timings": timings(ends[0]),
        }
        if self._is_verbose:
            result["__verbose"] = self._verbose(answers[0], jobs[0])
        return result

    def _choice(self, answer: Answer, index: int) -> dict[str, Any]:
        message = read_answer(self._new_parser(), answer.text)
        choice: dict[str, Any] = {
            "finish_reason": finish_reason(answer.end, bool(message.calls)),
            "index": index,
            "message": show_message(message),
        }
        if self._sampling.n_probs:
            choice["logprobs"] = {"content": probabilities(self._front.model, answer.tokens, answer.logprobs)}
        return choice

    def _verbose(self, answer: Answer, job: Any) -> dict[str, Any]:
        return LlamaShape(self._front, self._body, self._sampling).final(answer, job, 0)

    # In pieces

    def begin(self, run: Run) -> bytes:
        n_jobs = len(run.jobs)
        self._jobs = run.jobs
        self._parsers = [self._new_parser() for _ in run.jobs]
        self._live = [LiveTimings() for _ in run.jobs] if self._has_timings else []
        self._called = [False] * n_jobs
        self._answers = [Answer() for _ in run.jobs]
        self._ends: list[End] = []
        # Around the text of a chunk that has nothing but content.
        heads = [self._chunk(index, {"content": ""}).partition(_NOTHING) for index in range(n_jobs)]
        self._around = [(head, rest) for head, _, rest in heads]
        return b"".join(self._chunk(i, {"role": "assistant", "content": None}) for i in range(n_jobs))

    def write(self, events: list[JobEvent]) -> bytes:
        out: list[bytes] = []
        for each in events:
            index = each.choice
            if isinstance(each, Piece):
                if self._has_timings:
                    self._live[index].tokens(len(each.tokens))
                if self._is_verbose:
                    self._answers[index].add(each)
                self._write_deltas(out, index, self._parsers[index].push(each.text), each)
            elif isinstance(each, Progress):
                if self._has_timings:
                    self._live[index].progress(each.n_cached, each.n_processed, each.seconds)
                more = self._more(index)
                out.append(self._chunk(index, {}, prompt_progress=show_progress(each), **more))
            else:
                self._write_deltas(out, index, self._parsers[index].finish(), None)
                self._answers[index].add(each)
                self._ends.append(each)
                out.append(self._last(each))
        return b"".join(out)

    def end(self) -> bytes:
        return self._usage() + DONE if self._has_usage else DONE

    def _write_deltas(self, out: list[bytes], index: int, deltas: list[Event], piece: Piece | None) -> None:
        """A chunk for each delta. Neighbouring content of one batch is one chunk already."""
        if piece is not None and self._sampling.n_probs:
            content = probabilities(self._front.model, piece.tokens, piece.logprobs or [])
            first = show_delta(deltas[0]) if deltas else {}
            out.append(
                self._chunk(index, first, choice={"logprobs": {"content": content}}, **self._more(index))
            )
            self._called[index] |= any(isinstance(delta, CallStart) for delta in deltas)
            deltas = deltas[1:]
        for delta in deltas:
            if isinstance(delta, ContentDelta) and not self._has_timings:
                head, rest = self._around[index]
                out.append(head + orjson.dumps(delta.text) + rest)
            else:
                self._called[index] |= isinstance(delta, CallStart)
                out.append(self._chunk(index, show_delta(delta), **self._more(index)))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish: str | None = None,
        choice: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        shown = {"finish_reason": finish, "index": index, "delta": delta, **(choice or {})}
        head = orjson.dumps({"choices": [shown], **more}, option=orjson.OPT_NON_STR_KEYS)
        return b"data: " + head[:-1] + b"," + self._tail + b"\n\n"

    def _last(self, end: End) -> bytes:
        index = end.choice
        more: dict[str, Any] = {} if self._has_usage else {"timings": timings(end)}
        if self._is_verbose:
            more["__verbose"] = self._verbose(self._answers[index], self._jobs[index])
        return self._chunk(index, {}, finish=finish_reason(end, self._called[index]), **more)

    def _usage(self) -> bytes:
        ends = sorted(self._ends, key=lambda end: end.choice)
        head = orjson.dumps({"choices": [], "usage": usage(ends), "timings": timings(ends[0])})
        return b"data: " + head[:-1] + b"," + self._tail + b"\n\n"

    def _more(self, index: int) -> dict[str, Any]:
        return {"timings": self._live[index].show()} if self._has_timings else {}


def finish_reason(end: End, has_calls: bool) -> str:
    reason = OPENAI_FINISH[end.reason]
    return "tool_calls" if has_calls and reason == "stop" else reason


def show_message(message: ParsedAnswer) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.calls:
        shown["content"] = message.content or None
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return shown


def show_delta(delta: Event) -> dict[str, Any]:
    """A delta as OpenAI streams it: a call's name comes once, whole, and its index always."""
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text}
    if isinstance(delta, CallStart):
        function = {"name": delta.name, "arguments": ""}
        return {
            "tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]
        }
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def read_answer(parser: AnswerParser, text: str) -> ParsedAnswer:
    """A whole answer at once."""
    answer = ParsedAnswer().add(parser.push(text))
    return answer.add(parser.finish())
