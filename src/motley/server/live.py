"""The live view: what `/motley/live` sends, twice a second, as server-sent events with one JSON object each.

    {"model":       {"name": "motley-15m.gguf", "n_params": 14555520, "size": 15591712, "n_ctx": 4096},
     "devices":     [{"name": "cpu#0", "share": 0.749, "memory": {"weights": 11639808, "cache": 1048576, …}}, …],
     "cache":       {"block_size": 16, "n_sequences": 1, "n_tokens": 120,
                     "groups": [{"name": "full", "n_blocks": 256, "n_used": 8, "n_shared": 2, "n_cached": 40, …}],
                     "prefix": {"n_query_tokens": 480, "n_hit_tokens": 120, …}},
     "requests":    {"running": 1, "waiting": 0, "slots": [{"id": 0, "n_prompt": 80, "n_new": 40}]},
     "rates":       {"prompt": 812.0, "new": 55.1},          tokens/s since the event before
     "totals":      {"requests": 3, "cancelled": 0, "failed": 0, "prompt_tokens": 480, "cached_tokens": 120,
                     "new_tokens": 190},
     "speculation": {"drafted": 60, "accepted": 41},
     "steps": 210}

share: the part of all weights' bytes that the device holds. Bytes are those of each purpose (`LLM.device_memory`).
Everything comes from what the front already has: nothing asks the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from motley.server.replies import event

if TYPE_CHECKING:
    from motley.server.front import Front

_EVERY = 0.5  # seconds


@dataclass(frozen=True)
class Counts:
    """The front's counters. `slots`: for each running request its slot, prompt tokens and new tokens."""

    n_requests: int = 0
    n_cancelled: int = 0
    n_failed: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_new: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    slots: Sequence[tuple[int, int, int]] = ()

    @property
    def n_new_so_far(self) -> int:
        """The number of new tokens, including those of unfinished answers."""
        return self.n_new + sum(n_new for _, _, n_new in self.slots)


class LiveFeed:
    """Makes the events of one reader: rates are since its event before."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: tuple[float, int, int] | None = None

    def snapshot(
        self, info: Mapping[str, Any], stats: Mapping[str, Any], counts: Counts, *, now: float
    ) -> dict[str, Any]:
        """One event. `info` and `stats` are the engine's, and may be empty while it loads."""
        devices = info.get("devices") or {}
        total = sum(memory.get("weights", 0) for memory in devices.values())
        cache = dict(stats.get("cache") or {})
        return {
            "model": {"name": self._name} | {key: info.get(key) for key in ("n_params", "size", "n_ctx")},
            "devices": [
                {
                    "name": label,
                    "share": memory.get("weights", 0) / total if total else 0.0,
                    "memory": dict(memory),
                }
                for label, memory in devices.items()
            ],
            "cache": cache,
            "requests": {
                "running": stats.get("n_running", 0),
                "waiting": stats.get("n_waiting", 0),
                "slots": [
                    {"id": number, "n_prompt": n_prompt, "n_new": n_new}
                    for number, n_prompt, n_new in counts.slots
                ],
            },
            "rates": self._rates(counts, now),
            "totals": {
                "requests": counts.n_requests,
                "cancelled": counts.n_cancelled,
                "failed": counts.n_failed,
                "prompt_tokens": counts.n_prompt,
                "cached_tokens": counts.n_cached,
                "new_tokens": counts.n_new_so_far,
            },
            "speculation": {"drafted": counts.n_drafted, "accepted": counts.n_accepted},
            "steps": stats.get("n_steps", 0),
        }

    def _rates(self, counts: Counts, now: float) -> dict[str, float]:
        before, self._before = self._before, (now, counts.n_prompt, counts.n_new_so_far)
        if before is None or now <= before[0]:
            return {"prompt": 0.0, "new": 0.0}
        seconds = now - before[0]
        return {
            "prompt": max(0.0, (counts.n_prompt - before[1]) / seconds),
            "new": max(0.0, (counts.n_new_so_far - before[2]) / seconds),
        }


async def live(front: Front, request: Request) -> Response:
    """GET /motley/live."""
    feed = LiveFeed(front.settings.model_name)

    async def chunks() -> AsyncIterator[bytes]:
        while not front.is_leaving():  # an open stream would delay the end
            counts = _counts(front)
            yield event(feed.snapshot(front.engine.info, front.engine.stats, counts, now=time.monotonic()))
            await asyncio.sleep(_EVERY)

    return StreamingResponse(
        chunks(),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


def _counts(front: Front) -> Counts:
    metrics = front.metrics
    busy = [slot for slot in front.engine.slots.all if slot.job is not None]
    return Counts(
        n_requests=metrics.n_requests,
        n_cancelled=metrics.n_cancelled,
        n_failed=metrics.n_failed,
        n_prompt=metrics.n_prompt + metrics.n_cached,
        n_cached=metrics.n_cached,
        n_new=metrics.n_new,
        n_drafted=metrics.n_draft,
        n_accepted=metrics.n_accepted,
        slots=[(slot.number, len(slot.job.tokens), slot.n_decoded) for slot in busy if slot.job is not None],
    )
