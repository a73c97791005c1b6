"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
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
from motley.server.parts import PlainParser
from motley.server.replies import DONE, JSON, Answer, Run, answers_of, stream_of
from motley.server.sampling import Sampling, read_sampling
from motley.server.shape import OPENAI_FINISH, LiveTimings, probabilities, timings, usage
from motley.text.tools import AnswerParser, CallStart, ContentDelta, Event, ParsedAnswer, ReasoningDelta


async def complete(front: Front, request: Request) -> Response:
    body = await front.body(request)
    chat = await read_chat(body, front.model, front.settings)
    sampling = await chat_sampling(front, body, chat)
    jobs = chat_jobs(front, body, chat, sampling, read_n(body, front))
    shape = Shape(front, body, sampling, new_parser(chat))
    if body.flag("stream"):
        return await stream_of(
            request, front.engine, jobs, shape.chunks, stalled_seconds=front.settings.limits.stalled_seconds
        )
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

    async def chunks(self, run: Run) -> AsyncIterator[bytes]:
        parsers = [self._new_parser() for _ in run.jobs]
        live = [LiveTimings() for _ in run.jobs]
        called = [False for _ in run.jobs]
        answers = [Answer() for _ in run.jobs]
        ends: list[End] = []
        yield b"".join(self._chunk(i, {"role": "assistant", "content": None}) for i in range(len(run.jobs)))
        async for events in run.batches():
            out: list[bytes] = []
            for each in events:
                index = each.choice
                if isinstance(each, Piece):
                    live[index].tokens(len(each.tokens))
                    deltas = parsers[index].push(each.text)
                    called[index] |= any(isinstance(delta, CallStart) for delta in deltas)
                    out += self._deltas(index, deltas, each, live[index])
                    if self._is_verbose:
                        answers[index].add(each)
                elif isinstance(each, Progress):
                    live[index].progress(each.n_cached, each.n_processed, each.seconds)
                    out.append(
                        self._chunk(index, {}, prompt_progress=show_progress(each), **self._live(live[index]))
                    )
                else:
                    deltas = parsers[index].finish()
                    called[index] |= any(isinstance(delta, CallStart) for delta in deltas)
                    out += self._deltas(index, deltas, None, live[index])
                    answers[index].add(each)
                    ends.append(each)
                    out.append(self._last(each, called[index], answers[index], run))
            yield b"".join(out)
        if self._has_usage:
            yield self._usage(ends)
        yield DONE

    def _deltas(self, index: int, deltas: list[Event], piece: Piece | None, live: LiveTimings) -> list[bytes]:
        """A chunk for each delta. Neighbouring content of one batch is one chunk already."""
        more = self._live(live)
        if piece is not None and self._sampling.n_probs:
            content = probabilities(self._front.model, piece.tokens, piece.logprobs or [])
            choice = {"logprobs": {"content": content}}
            shown = [show_delta(delta) for delta in deltas] or [{}]
            return [self._chunk(index, shown[0], choice=choice, **more)] + [
                self._chunk(index, delta, **more) for delta in shown[1:]
            ]
        return [self._chunk(index, show_delta(delta), **more) for delta in deltas]

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

    def _last(self, end: End, has_calls: bool, answer: Answer, run: Run) -> bytes:
        more: dict[str, Any] = {} if self._has_usage else {"timings": timings(end)}
        if self._is_verbose:
            more["__verbose"] = self._verbose(answer, run.jobs[end.choice])
        return self._chunk(end.choice, {}, finish=finish_reason(end, has_calls), **more)

    def _usage(self, ends: list[End]) -> bytes:
        ends = sorted(ends, key=lambda end: end.choice)
        head = orjson.dumps({"choices": [], "usage": usage(ends), "timings": timings(ends[0])})
        return b"data: " + head[:-1] + b"," + self._tail + b"\n\n"

    def _live(self, live: LiveTimings) -> dict[str, Any]:
        return {"timings": live.show()} if self._has_timings else {}


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
