"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from motley.server.api.llama import Shape as LlamaShape
from motley.server.api.llama import make_jobs, read_n, show_progress
from motley.server.constraints import check
from motley.server.errors import invalid, not_supported
from motley.server.fields import Fields
from motley.server.front import FINGERPRINT, Front, new_id
from motley.server.jobs import End, Event, Job, Piece
from motley.server.prompts import read_prompts
from motley.server.replies import DONE, JSON, Answer, Run, answers_of
from motley.server.sampling import Sampling, read_sampling
from motley.server.shape import OPENAI_FINISH, LiveTimings, probabilities, timings, usage
from motley.server.streams import stream_of

_TEXT = b'data: {"choices":[{"text":'  # how a chunk begins


async def complete(front: Front, request: Request) -> Response:
    body = await front.body(request)
    if body.raw("suffix"):
        raise not_supported("suffix is not supported; use /infill")
    prompts, _ = await read_prompts(body.raw("prompt"), front.model, front.settings.limits, n_ctx=front.n_ctx)
    sampling = read_sampling(body, front.model, front.settings, n_probs=_read_logprobs(body))
    await check(sampling.params)
    jobs = make_jobs(front, body, prompts, sampling, read_n(body, front))
    shape = Shape(front, body, sampling)
    if body.flag("stream"):
        return await stream_of(request, front.engine, jobs, shape)
    answers = await answers_of(request, front.engine, jobs)
    return JSON(shape.complete(answers, jobs))


def _read_logprobs(body: Fields) -> int:
    """Here `logprobs` is a number; 0 asks for the chosen token's only. Chat's form is understood, too."""
    given = body.raw("logprobs")
    if given is None or given is False:
        return 0
    n_top = body.integer("top_logprobs", 1) if given is True else body.integer("logprobs")
    if n_top is None or not 0 <= n_top <= 20:
        raise invalid("logprobs must be from 0 to 20", param="logprobs")
    return max(1, n_top)


class Shape:
    """Answers in the form of text completions."""

    def __init__(self, front: Front, body: Fields, sampling: Sampling) -> None:
        self._front = front
        self._body = body
        self._sampling = sampling
        self._echoes = body.flag("echo")
        self._is_verbose = body.flag("verbose") or front.settings.is_verbose
        options = body.mapping("stream_options") or {}
        self._has_usage = bool(options.get("include_usage"))
        self._has_timings = body.flag("timings_per_token")
        self._head = {
            "created": int(time.time()),
            "model": front.settings.model_name,
            "system_fingerprint": FINGERPRINT,
            "object": "text_completion",
            "id": new_id("cmpl-"),
        }
        self._tail = orjson.dumps(self._head)[1:]
        self._is_plain = not (self._has_timings or sampling.n_probs)
        self._ends: list[End] = []

    def complete(self, answers: list[Answer], jobs: list[Job]) -> dict[str, Any]:
        ends = [answer.end for answer in answers]
        result: dict[str, Any] = {
            "choices": [
                {
                    "text": self._prompt_of(job) + answer.text,
                    "index": index,
                    "logprobs": self._logprobs(answer.tokens, answer.logprobs),
                    "finish_reason": OPENAI_FINISH[answer.end.reason],
                }
                for index, (answer, job) in enumerate(zip(answers, jobs, strict=True))
            ],
            **self._head,
            "usage": usage_of_prompts(ends, jobs),
            "timings": timings(ends[0]),
        }
        if self._is_verbose:
            shape = LlamaShape(self._front, self._body, self._sampling)
            result["__verbose"] = shape.final(answers[0], jobs[0], 0)
        return result

    # In pieces

    def begin(self, run: Run) -> bytes:
        self._jobs = run.jobs
        self._live = [LiveTimings() for _ in run.jobs] if self._has_timings else []
        # Around the text of a chunk that has nothing but text.
        self._rest = [self._chunk(index, "").removeprefix(_TEXT + b'""') for index in range(len(run.jobs))]
        if not self._echoes:
            return b""
        return b"".join(self._chunk(i, self._prompt_of(job)) for i, job in enumerate(run.jobs))

    def write(self, events: list[Event]) -> bytes:
        if len(events) == 1:
            return self._event(events[0])
        return b"".join([self._event(each) for each in events])

    def end(self) -> bytes:
        if not self._has_usage:
            return DONE
        ends = sorted(self._ends, key=lambda end: end.choice)
        head = orjson.dumps(
            {"choices": [], "usage": usage_of_prompts(ends, self._jobs), "timings": timings(ends[0])}
        )
        return b"data: " + head[:-1] + b"," + self._tail + b"\n\n" + DONE

    def _event(self, each: Event) -> bytes:
        index = each.choice
        if isinstance(each, Piece):
            if self._is_plain:
                return _TEXT + orjson.dumps(each.text) + self._rest[index]
            shown: dict[str, Any] = {}
            if self._has_timings:
                self._live[index].tokens(len(each.tokens))
                shown["timings"] = self._live[index].show()
            logprobs = self._logprobs(each.tokens, each.logprobs or [])
            return self._chunk(index, each.text, logprobs=logprobs, **shown)
        if isinstance(each, End):
            self._ends.append(each)
            more = {} if self._has_usage else {"usage": usage([each]), "timings": timings(each)}
            return self._chunk(index, "", finish=OPENAI_FINISH[each.reason], **more)
        return self._chunk(index, "", prompt_progress=show_progress(each))

    def _chunk(
        self, index: int, text: str, *, finish: str | None = None, logprobs: Any = None, **more: Any
    ) -> bytes:
        choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}
        return b"data: " + orjson.dumps({"choices": [choice], **more})[:-1] + b"," + self._tail + b"\n\n"

    def _logprobs(self, tokens: list[int], logprobs: list[Any]) -> dict[str, Any] | None:
        """llama-server's form (`content`), and OpenAI's old one beside it."""
        if not self._sampling.n_probs:
            return None
        content = probabilities(self._front.model, tokens, logprobs)
        return {
            "content": content,
            "tokens": [entry["token"] for entry in content],
            "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in content
            ],
            "text_offset": _offsets([entry["token"] for entry in content]),
        }

    def _prompt_of(self, job: Job) -> str:
        return self._front.model.tokenizer.decode(job.tokens) if self._echoes else ""


def usage_of_prompts(ends: list[End], jobs: list[Job]) -> dict[str, Any]:
    """`usage` over several prompts: choices of one prompt count it once."""
    first: dict[int, End] = {}
    for end, job in zip(ends, jobs, strict=True):
        first.setdefault(id(job.tokens), end)
    total = usage(ends)
    n_prompt = sum(end.n_prompt for end in first.values())
    return total | {
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + total["completion_tokens"],
        "prompt_tokens_details": {"cached_tokens": sum(end.n_cached for end in first.values())},
    }


def _offsets(texts: list[str]) -> list[int]:
    offsets, position = [], 0
    for text in texts:
        offsets.append(position)
        position += len(text)
    return offsets
