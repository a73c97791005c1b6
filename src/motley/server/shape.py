"""Parts of replies that several APIs share: timings, usage, probabilities."""

from __future__ import annotations

import math
import time
from typing import Any

from motley.server.jobs import End
from motley.server.model import FrontModel

_MIN_LOGPROB = -9999.0  # instead of -inf, which JSON does not have
OPENAI_FINISH = {"stop": "stop", "length": "length", "cancelled": "stop", "failed": "stop"}


def timings(end: End) -> dict[str, Any]:
    """llama-server's `timings`. Rates count the steps after the first token; they are never null."""
    n_prompt, prompt_ms = end.n_prompt - end.n_cached, 1000 * end.prompt_seconds
    shown = _timings(end.n_cached, n_prompt, prompt_ms, end.n_new, 1000 * end.new_seconds)
    if end.n_drafted:
        shown |= {"draft_n": end.n_drafted, "draft_n_accepted": end.n_accepted}
    return shown


def _timings(n_cached: int, n_prompt: int, prompt_ms: float, n_new: int, new_ms: float) -> dict[str, Any]:
    n_later = max(0, n_new - 1)
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / n_prompt if n_prompt else 0.0,
        "prompt_per_second": 1000 * n_prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": n_new,
        "predicted_ms": new_ms,
        "predicted_per_token_ms": new_ms / n_later if n_later else 0.0,
        "predicted_per_second": 1e3 / new_ms * n_later if new_ms else 0.0,
    }


class LiveTimings:
    """The timings of an answer that still runs, as far as the front sees them."""

    def __init__(self) -> None:
        self._n_cached = self._n_prompt = 0
        self._prompt_ms = 0.0
        self._n_new = 0
        self._started = time.perf_counter()
        self._first = 0.0

    def progress(self, n_cached: int, n_processed: int, seconds: float) -> None:
        self._n_cached, self._n_prompt = n_cached, n_processed - n_cached
        self._prompt_ms = 1000 * seconds

    def tokens(self, n_tokens: int) -> None:
        now = time.perf_counter()
        if not self._first:
            self._first = now
            self._prompt_ms = self._prompt_ms or 1000 * (now - self._started)
        self._n_new += n_tokens

    def show(self) -> dict[str, Any]:
        new_ms = 1000 * (time.perf_counter() - self._first) if self._first else 0.0
        return _timings(self._n_cached, self._n_prompt, self._prompt_ms, self._n_new, new_ms)


def usage(ends: list[End]) -> dict[str, Any]:
    """OpenAI's `usage`; choices of one prompt count it once."""
    n_prompt, n_new = ends[0].n_prompt, sum(end.n_new for end in ends)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": ends[0].n_cached},
    }


def stop_type(end: End) -> str:
    """How llama-server calls the reason of the end."""
    if end.reason == "length":
        return "limit"
    if end.reason == "stop":
        return "eos" if end.stop is None else "word"
    return "none"


def token_bytes(model: FrontModel, token: int) -> bytes:
    return model.tokenizer.token_bytes(token)


def token_text(data: bytes) -> str:
    return data.decode(errors="replace")


def probabilities(
    model: FrontModel, tokens: list[int], logprobs: list[Any], *, post_sampling: bool = False
) -> list[dict[str, Any]]:
    """For each token its log probability and the likeliest ones: OpenAI's form with llama-server's ids.

    `post_sampling`: probabilities of the distribution that was drawn from; tokens without any are left out.
    """
    name, top_name = ("prob", "top_probs") if post_sampling else ("logprob", "top_logprobs")

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        data = token_bytes(model, token)
        value = math.exp(_MIN_LOGPROB if logprob is None else logprob) if post_sampling else logprob
        return {
            "id": token,
            "token": token_text(data),
            "bytes": list(data),
            name: _MIN_LOGPROB if value is None else value,
        }

    return [
        entry(token, logprob)
        | {top_name: [entry(other, value) for other, value in top if not post_sampling or value is not None]}
        for token, (logprob, top) in zip(tokens, logprobs, strict=False)
    ]
