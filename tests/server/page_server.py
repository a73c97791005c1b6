"""A small server that speaks the API, for tests of the page: it answers what the test tells it to, in pieces."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import motley.server
from motley.server.live import Counts, LiveFeed

PAGE = Path(motley.server.__file__).parent / "page"
POLICY = {"content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"}
GIB = 2**30
INFO = {
    "n_params": 8_030_000_000,
    "size": 5 * GIB,
    "n_ctx": 8192,
    "devices": {
        "cuda:0": {"weights": 3 * GIB, "kv_cache": GIB, "activations": GIB // 8},
        "cuda:1": {"weights": 3 * GIB // 2, "kv_cache": GIB // 2, "activations": GIB // 8},
        "cpu": {"weights": GIB // 2, "kv_cache": GIB // 8, "activations": GIB // 16},
    },
}
STATS = {
    "n_running": 2,
    "n_waiting": 1,
    "n_steps": 4711,
    "cache": {
        "block_size": 16,
        "n_sequences": 2,
        "n_tokens": 3010,
        "groups": [{"name": "full", "n_blocks": 512, "n_used": 180, "n_shared": 60, "n_cached": 120}],
        "prefix": {"n_queries": 40, "n_query_tokens": 20000, "n_hit_tokens": 15000, "n_evictions": 3},
    },
}
Delta = dict[str, Any]


class PageServer:
    """Runs in a thread. `answers`: for each request in turn, its deltas; `bodies`: what was asked.

    `hold`: an answer stops after its first delta until `release` is set, so that a test can act meanwhile.
    """

    def __init__(self, *, key: str | None = None) -> None:
        self.key = key
        self.answers: list[Sequence[Delta]] = []
        self.bodies: list[dict[str, Any]] = []
        self.hold = False
        self.release = threading.Event()
        self.left = threading.Event()  # a client went away in an answer
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self._app(), log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.release.set()
        self._server.should_exit = True
        self._thread.join(60)

    def _app(self) -> Starlette:
        def guarded(handle: Callable[[Request], Any]) -> Callable[[Request], Any]:
            async def endpoint(request: Request) -> Response:
                if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                    return JSONResponse({"error": {"message": "Invalid API Key"}}, 401)
                reply: Response = await handle(request)
                return reply

            return endpoint

        async def file(request: Request) -> Response:
            name = request.path_params.get("name") or "index.html"
            if not (PAGE / name).is_file():
                return Response(status_code=404)
            return FileResponse(PAGE / name, headers=POLICY)

        async def health(request: Request) -> Response:
            return JSONResponse({"status": "ok"})

        async def models(request: Request) -> Response:
            return JSONResponse({"data": [{"id": "test-model", "meta": {"n_ctx": 8192}}]})

        async def props(request: Request) -> Response:
            settings = {"n_ctx": 8192, "params": {"temperature": 0.8, "top_k": 40}}
            return JSONResponse({"default_generation_settings": settings})

        async def live(request: Request) -> Response:
            async def chunks() -> AsyncIterator[str]:
                feed, now, n_new = LiveFeed("test-model"), 0.0, 0
                while not self._server.should_exit:
                    now, n_new = now + 0.5, n_new + 25
                    counts = Counts(
                        n_requests=12,
                        n_prompt=20000,
                        n_cached=15000,
                        n_new=n_new,
                        n_drafted=400,
                        n_accepted=300,
                        slots=[(0, 1200, 300), (1, 1400, 110)],
                    )
                    yield f"data: {json.dumps(feed.snapshot(INFO, STATS, counts, now=now))}\n\n"
                    await asyncio.sleep(0.05)

            return StreamingResponse(chunks(), media_type="text/event-stream")

        async def chat(request: Request) -> Response:
            self.bodies.append(await request.json())
            deltas = self.answers.pop(0) if self.answers else [{"content": "Well."}]
            return StreamingResponse(self._chunks(deltas), media_type="text/event-stream")

        return Starlette(
            routes=[
                Route("/", file),
                Route("/health", health),
                Route("/v1/models", guarded(models)),
                Route("/props", guarded(props)),
                Route("/motley/live", guarded(live)),
                Route("/v1/chat/completions", guarded(chat), methods=["POST"]),
                Route("/{name}", file),
            ]
        )

    async def _chunks(self, deltas: Sequence[Delta]) -> AsyncIterator[str]:
        def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
            return f"data: {json.dumps({'choices': choices, **more})}\n\n"

        yield chunk([{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}])
        finish = "stop"
        for i, delta in enumerate(deltas):
            if "error" in delta:
                yield f"data: {json.dumps(delta)}\n\n"
                return
            finish = "tool_calls" if "tool_calls" in delta else finish
            timings = {"predicted_per_second": 50.0, "predicted_n": i + 1, "cache_n": 4, "prompt_n": 6}
            yield chunk([{"index": 0, "delta": delta, "finish_reason": None}], timings=timings)
            try:
                while self.hold and not self.release.is_set():
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.left.set()
                raise
        yield chunk([{"index": 0, "delta": {}, "finish_reason": finish}])
        n = len(deltas)
        usage = {"prompt_tokens": 10, "completion_tokens": n, "total_tokens": 10 + n}
        timings = {"predicted_per_second": 50.0, "predicted_n": n, "cache_n": 4, "prompt_n": 6}
        yield chunk([], usage=usage, timings=timings)
        yield "data: [DONE]\n\n"
