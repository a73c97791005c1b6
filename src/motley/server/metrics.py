"""Counters for /metrics and for the log, kept by the front."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from motley.server.jobs import End

_PREFIX = "llamacpp:"


@dataclass
class Metrics:
    """Counters since the start; rates are since the last scrape, as in llama-server."""

    started: float = field(default_factory=time.time)
    n_prompt: int = 0
    n_cached: int = 0
    prompt_seconds: float = 0.0
    n_new: int = 0
    n_later: int = 0  # new tokens without the first of each answer
    new_seconds: float = 0.0
    n_tokens_max: int = 0
    n_requests: int = 0
    n_cancelled: int = 0
    n_failed: int = 0
    n_busy_sum: int = 0
    n_draft: int = 0
    n_accepted: int = 0
    n_drafts: int = 0
    _scraped: tuple[int, float, int, float] = (0, 0.0, 0, 0.0)

    def count(self, end: End) -> None:
        self.n_requests += 1
        self.n_cancelled += end.reason == "cancelled"
        self.n_failed += end.reason == "failed"
        if end.reason == "failed":
            return
        self.count_prompt(end.n_prompt - end.n_cached, end.prompt_seconds, n_cached=end.n_cached)
        self.n_new += end.n_new
        self.n_later += max(0, end.n_new - 1)
        self.new_seconds += end.new_seconds
        self.n_draft += end.n_drafted
        self.n_accepted += end.n_accepted
        self.n_drafts += end.n_drafts
        self.n_tokens_max = max(self.n_tokens_max, end.n_prompt + end.n_new)

    def count_prompt(self, n_tokens: int, seconds: float, *, n_cached: int = 0) -> None:
        self.n_prompt += n_tokens
        self.n_cached += n_cached
        self.prompt_seconds += seconds

    def render(self, stats: dict[str, Any], *, n_busy: int, n_deferred: int) -> str:
        """Prometheus' text format."""
        before = self._scraped
        self._scraped = (self.n_prompt, self.prompt_seconds, self.n_later, self.new_seconds)
        prompt_rate = _rate(self.n_prompt - before[0], self.prompt_seconds - before[1])
        new_rate = _rate(self.n_later - before[2], self.new_seconds - before[3])
        n_steps = stats.get("n_steps", 0)
        lines: list[str] = []
        for kind, name, text, value in (
            ("counter", "prompt_tokens_total", "Prompt tokens computed.", self.n_prompt),
            ("counter", "prompt_tokens_cached_total", "Prompt tokens found in the cache.", self.n_cached),
            ("counter", "prompt_seconds_total", "Time for prompts.", self.prompt_seconds),
            ("counter", "tokens_predicted_total", "Tokens generated.", self.n_new),
            ("counter", "tokens_predicted_seconds_total", "Time for generated tokens.", self.new_seconds),
            ("counter", "n_decode_total", "Steps of the engine.", n_steps),
            ("counter", "n_tokens_max", "The longest sequence so far, in tokens.", self.n_tokens_max),
            ("counter", "spec_decode_num_draft_tokens_total", "Tokens proposed by drafts.", self.n_draft),
            ("counter", "spec_decode_num_accepted_tokens_total", "Draft tokens accepted.", self.n_accepted),
            ("counter", "spec_decode_num_drafts_total", "Drafts that were computed.", self.n_drafts),
            ("gauge", "prompt_tokens_seconds", "Prompt tokens per second.", prompt_rate),
            ("gauge", "predicted_tokens_seconds", "Generated tokens per second.", new_rate),
            ("gauge", "requests_processing", "Requests that run.", n_busy),
            ("gauge", "requests_deferred", "Requests that wait.", n_deferred),
            (
                "gauge",
                "n_busy_slots_per_decode",
                "Requests in a step.",
                _rate(self.n_new + self.n_requests, n_steps),
            ),
        ):
            lines += _lines(_PREFIX + name, kind, text, value)
        lines += self._own(stats)
        return "\n".join(lines) + "\n"

    def _own(self, stats: dict[str, Any]) -> list[str]:
        lines: list[str] = []
        lines += _lines("motley:requests_total", "counter", "Requests that ended.", self.n_requests)
        lines += _lines(
            "motley:requests_cancelled_total", "counter", "Requests whose client left.", self.n_cancelled
        )
        lines += _lines("motley:requests_failed_total", "counter", "Requests that failed.", self.n_failed)
        cache = stats.get("cache", {})
        for index, group in enumerate(cache.get("groups", ())):
            for name, value in group.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    lines.append(f'motley:kv_{name}{{group="{index}"}} {value}')
        for name, value in cache.get("prefix", {}).items():
            lines += _lines(f"motley:prefix_{name}", "counter", "Of the prefix cache.", value)
        return lines


def _lines(name: str, kind: str, text: str, value: float) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {value}"]


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
