"""POST /completion: llama-server's own."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from motley.server.constraints import check
from motley.server.errors import invalid
from motley.server.fields import Fields
from motley.server.front import Front
from motley.server.jobs import End, Event, Job, Piece, Progress
from motley.server.prompts import read_prompts, require_room
from motley.server.replies import JSON, Answer, Run, answers_of, event
from motley.server.sampling import Sampling, for_choices, generation_settings, read_sampling
from motley.server.shape import LiveTimings, probabilities, stop_type, timings
from motley.server.streams import stream_of


async def complete(front: Front, request: Request) -> Response:
    body = await front.body(request)
    model = front.model
    prompts, is_list = await read_prompts(body.raw("prompt"), model, front.settings.limits, n_ctx=front.n_ctx)
    return await complete_prompts(front, request, body, prompts, is_list)


async def complete_prompts(
    front: Front, request: Request, body: Fields, prompts: list[tuple[int, ...]], is_list: bool
) -> Response:
    sampling = read_sampling(body, front.model, front.settings)
    await check(sampling.params)
    n_choices = read_n(body, front, "n_cmpl")
    jobs = make_jobs(front, body, prompts, sampling, n_choices)
    shape = Shape(front, body, sampling)
    if body.flag("stream"):
        return await stream_of(request, front.engine, jobs, shape)
    answers = await answers_of(request, front.engine, jobs)
    results = [
        shape.final(answer, job, index) for index, (answer, job) in enumerate(zip(answers, jobs, strict=True))
    ]
    return JSON(results if is_list or n_choices > 1 else results[0])


def read_n(body: Fields, front: Front, *names: str) -> int:
    """How many choices; 400 beyond the limit."""
    n = next((n for name in (*names, "n") if (n := body.integer(name)) is not None), 1)
    if not 1 <= n <= front.settings.limits.n_choices:
        raise invalid(f"n must be from 1 to {front.settings.limits.n_choices}", param="n")
    return n


def make_jobs(
    front: Front,
    body: Fields,
    prompts: list[tuple[int, ...]],
    sampling: Sampling,
    n_choices: int = 1,
    *,
    continues_prompt: bool = True,
    shows_special: bool = False,
) -> list[Job]:
    """A job for each choice of each prompt."""
    for tokens in prompts:
        require_room(tokens, front.n_ctx)
    if len(prompts) * n_choices > front.settings.limits.n_prompts:
        raise invalid(
            f"{len(prompts)} prompts with {n_choices} choices; at most {front.settings.limits.n_prompts}"
        )
    reports_progress = body.flag("return_progress") and body.flag("stream")
    return [
        Job(
            tokens,
            params,
            continues_prompt=continues_prompt,
            shows_special=shows_special,
            reports_progress=reports_progress,
            id_slot=body.integer("id_slot", -1) or 0,
            leader=number * n_choices if choice else None,
            discards_answer=sampling.discards_answer,
        )
        for number, tokens in enumerate(prompts)
        for choice, params in enumerate(for_choices(sampling, n_choices))
    ]


def is_truncated(front: Front, sampling: Sampling, end: End) -> bool:
    """Whether the context, and not the request, ended the answer; or tokens were dropped from it."""
    if end.n_prompt + end.n_new > front.n_ctx:
        return True
    return end.reason == "length" and not 0 <= sampling.n_predict <= end.n_new


class Shape:
    """Results of /completion in llama-server's form."""

    def __init__(self, front: Front, body: Fields, sampling: Sampling) -> None:
        self._front = front
        self._sampling = sampling
        self._is_stream = body.flag("stream")
        self._returns_tokens = body.flag("return_tokens")
        self._fields = body.items("response_fields") or []
        self._has_timings = body.flag("timings_per_token")

    def final(self, answer: Answer, job: Job, index: int) -> dict[str, Any]:
        """The complete result."""
        end, front = answer.end, self._front
        text = answer.text
        result: dict[str, Any] = {
            "index": index,
            "content": "" if self._is_stream else text,
            "tokens": answer.tokens if self._returns_tokens and not self._is_stream else [],
            "id_slot": end.id_slot,
            "stop": True,
            "model": front.settings.model_name,
            "tokens_predicted": end.n_new,
            "tokens_evaluated": end.n_prompt,
            "generation_settings": generation_settings(
                self._sampling,
                front.model,
                front.drafters,
                stream=self._is_stream,
                timings_per_token=self._has_timings,
            ),
            "prompt": front.model.show(job.tokens),
            "has_new_line": "\n" in text,
            "truncated": is_truncated(front, self._sampling, end),
            "stop_type": stop_type(end),
            "stopping_word": end.stop or "",
            "tokens_cached": end.n_prompt + max(0, end.n_new - 1),
            "timings": timings(end),
        }
        if self._sampling.n_probs and not self._is_stream:
            result["completion_probabilities"] = self._probabilities(answer.tokens, answer.logprobs)
        return _selected(result, self._fields) if self._fields else result

    def _probabilities(self, tokens: list[int], logprobs: list[Any]) -> list[dict[str, Any]]:
        return probabilities(
            self._front.model, tokens, logprobs, post_sampling=self._sampling.post_sampling_probs
        )

    # In pieces

    def begin(self, run: Run) -> bytes:
        self._run = run
        self._answers = [Answer() for _ in run.jobs]
        self._live = [LiveTimings() for _ in run.jobs]
        return b""

    def write(self, events: list[Event]) -> bytes:
        out = []
        for each in events:
            answer, live = self._answers[each.choice], self._live[each.choice]
            answer.add(each)
            if isinstance(each, End):
                out.append(event(self.final(answer, self._run.jobs[each.choice], each.choice)))
            elif isinstance(each, Piece):
                live.tokens(len(each.tokens))
                out.append(event(self._partial(each, answer, live)))
            else:
                live.progress(each.n_cached, each.n_processed, each.seconds)
                out.append(event(self._progress(each, live)))
        return b"".join(out)

    def end(self) -> bytes:
        return b""

    def _partial(self, piece: Piece, so_far: Answer, live: LiveTimings) -> dict[str, Any]:
        result: dict[str, Any] = {
            "index": piece.choice,
            "content": piece.text,
            "tokens": piece.tokens,
            "stop": False,
            "id_slot": self._front.engine.slots.of(self._run.tickets[piece.choice].number),
            "tokens_predicted": len(so_far.tokens),
            "tokens_evaluated": len(self._run.jobs[piece.choice].tokens),
        }
        if self._has_timings:
            result["timings"] = live.show()
        if self._sampling.n_probs:
            result["completion_probabilities"] = self._probabilities(piece.tokens, piece.logprobs or [])
        return result

    def _progress(self, progress: Progress, live: LiveTimings) -> dict[str, Any]:
        result = {
            "index": progress.choice,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": self._front.engine.slots.of(self._run.tickets[progress.choice].number),
            "tokens_predicted": 0,
            "tokens_evaluated": progress.n_prompt,
            "prompt_progress": show_progress(progress),
        }
        if self._has_timings:
            result["timings"] = live.show()
        return result


def show_progress(progress: Progress) -> dict[str, Any]:
    return {
        "total": progress.n_prompt,
        "cache": progress.n_cached,
        "processed": progress.n_processed,
        "time_ms": round(1000 * progress.seconds),
    }


def _selected(result: dict[str, Any], fields: list[Any]) -> dict[str, Any]:
    """Only these fields; "a/b" takes b out of a."""
    selected = {}
    for field in fields:
        value: Any = result
        for name in str(field).split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            selected[str(field)] = value
    return selected
