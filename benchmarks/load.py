"""A light load generator for the server's benchmarks: raw HTTP over asyncio, streams of completions."""

from __future__ import annotations

import asyncio
import json
import time
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


async def stream(host: str, port: int, path: str, body: dict[str, Any]) -> Sample:
    """Sends one request and reads its events to their end."""
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    sample, started = Sample(), time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + data)
    last, tail = 0.0, b""
    sample.status = int((await reader.readline()).split()[1])
    while part := await reader.read(2**16):
        tail = (tail + part)[-4096:]
        if b'"content":"' in part or b'"text":"' in part:
            now = time.perf_counter()
            if last:
                sample.gaps.append(now - last)
            else:
                sample.first = now - started
            last = now
    sample.total = time.perf_counter() - started
    writer.close()
    found = tail.rfind(b'"completion_tokens":')
    if found >= 0:
        sample.n_tokens = int(tail[found + 20 :].split(b",")[0].split(b"}")[0])
    return sample


async def load(
    url: str, n_clients: int, n_requests: int, body: dict[str, Any], path: str = "/v1/completions"
) -> tuple[list[Sample], float]:
    """`n_requests` over `n_clients` at a time: the samples, and the seconds for all."""
    host, port = url.removeprefix("http://").split(":")
    todo = iter(range(n_requests))
    samples: list[Sample] = []

    async def client() -> None:
        for number in todo:
            samples.append(await stream(host, int(port), path, body | {"seed": number}))

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(n_clients)))
    return samples, time.perf_counter() - started


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
