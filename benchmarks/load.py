"""A light load generator for the server's benchmarks: raw HTTP over asyncio's protocols, streams of completions.

It shares the machine with the server, so it does little for a chunk: no stream objects, no task is woken, nothing is
parsed before the end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """One streamed request, in seconds."""

    first: float = 0.0  # until the first chunk with content
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between chunks
    n_tokens: int = 0
    status: int = 0


Reply = tuple[
    float, float, list[tuple[float, bytes]]
]  # begin, end, and the parts of a reply with their times


class _Connection(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self.started = time.perf_counter()
        self.parts: list[tuple[float, bytes]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None)


async def stream(host: str, port: int, path: str, body: dict[str, Any]) -> Reply:
    """Sends one request and reads its events to their end."""
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: _Connection(head.encode() + data), host, port)
    await connection.done
    return connection.started, time.perf_counter(), connection.parts


def sample_of(reply: Reply) -> Sample:
    started, ended, parts = reply
    sample = Sample(total=ended - started)
    whole = b"".join(part for _, part in parts)
    sample.status = int(whole.split(b" ", 2)[1]) if whole else 0
    times = [at for at, part in parts if b'"content":"' in part or b'"text":"' in part]
    if times:
        sample.first = times[0] - started
        sample.gaps = [later - before for before, later in itertools.pairwise(times)]
    found = whole.rfind(b'"completion_tokens":')
    if found >= 0:
        sample.n_tokens = int(whole[found + 20 :].split(b",")[0].split(b"}")[0])
    return sample


async def load(
    url: str,
    n_clients: int,
    n_requests: int,
    body: dict[str, Any],
    path: str = "/v1/completions",
    lengths: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
) -> tuple[list[Sample], float]:
    """`n_requests` over `n_clients` at a time: the samples, and the seconds for all. `lengths`: of each answer."""
    host, port = url.removeprefix("http://").split(":")
    todo = iter(range(n_requests))
    replies: list[Reply] = []

    async def client() -> None:
        for number in todo:
            own = {"seed": number if seeds is None else seeds[number]}
            if lengths is not None:
                own["max_tokens"] = lengths[number]
            replies.append(await stream(host, int(port), path, body | own))

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(n_clients)))
    seconds = time.perf_counter() - started
    return [
        sample_of(reply) for reply in replies
    ], seconds  # read after the clock: clients of one process wait for it


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
