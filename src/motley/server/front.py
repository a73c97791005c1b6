"""The ASGI application: routes, and what all handlers share."""

from __future__ import annotations

import asyncio
import logging
import mimetypes
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive

from motley import __version__
from motley.errors import MotleyError
from motley.server.engine_client import DEAD, READY, EngineClient, Ticket
from motley.server.errors import ApiError, invalid, of_motley
from motley.server.fields import Fields
from motley.server.jobs import End
from motley.server.metrics import Metrics
from motley.server.model import FrontModel
from motley.server.replies import JSON, error_reply
from motley.server.routes import Endpoint, Routes
from motley.server.security import Guard
from motley.server.settings import ServerSettings

_log = logging.getLogger("motley.server")

PAGE = Path(__file__).parent / "page"
FINGERPRINT = f"motley-{__version__}"
_CLIENT_LEFT = 499

Handle = Callable[["Front", Request], Awaitable[Response]]


class Front:
    """The objects that all handlers share."""

    def __init__(self, settings: ServerSettings, engine: EngineClient) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = Metrics()
        self.is_leaving: Callable[[], bool] = lambda: False  # whether the server is about to end
        self._model: FrontModel | None = None
        self._model_error: ApiError | None = None
        engine.on_end = self._ended

    async def read_model(self) -> None:
        """Reads tokenizer and template, in a thread, while the engine loads."""
        try:
            self._model = await asyncio.to_thread(FrontModel.read, self.settings)
        except MotleyError as error:
            self._model_error = of_motley(error)
            raise

    @property
    def is_ready(self) -> bool:
        return self._model is not None and self.engine.state == READY

    @property
    def model(self) -> FrontModel:
        """503 until it is read and the engine is ready."""
        self.engine.require_ready()
        if self._model is None:
            raise self._model_error or ApiError(503, "Loading model", headers={"Retry-After": "1"})
        return self._model

    @property
    def n_ctx(self) -> int:
        """Tokens of each request's context."""
        n_ctx: int = self.engine.info["n_ctx"]
        return n_ctx

    @property
    def drafters(self) -> str:
        """The drafters of requests that do not say, separated by commas; empty: none."""
        drafters: str = self.engine.info.get("drafters", "")
        return drafters

    async def body(self, request: Request) -> Fields:
        """The JSON object of a request."""
        try:
            data = await _received(request.receive)
            values = orjson.loads(data) if data else {}
        except (orjson.JSONDecodeError, RecursionError) as error:
            raise invalid(f"the body is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise invalid("the body must be a JSON object")
        return Fields(values)

    def _ended(self, end: End, ticket: Ticket) -> None:
        self.metrics.count(end)
        if _log.isEnabledFor(logging.INFO):
            line = {
                "request": ticket.number,
                "end": end.reason,
                "prompt": end.n_prompt,
                "cached": end.n_cached,
                "new": end.n_new,
                "queued_ms": round(1000 * end.queued_seconds, 1),
                "prompt_ms": round(1000 * end.prompt_seconds, 1),
                "decode_ms": round(1000 * end.new_seconds, 1),
                "total_ms": round(1000 * (time.monotonic() - ticket.submitted), 1),
            }
            if end.n_preemptions or end.n_retries:
                line |= {"preempted": end.n_preemptions, "retried": end.n_retries}
            if end.error is not None:
                line["error"] = end.error.message
            if self.settings.logs_prompts and self._model is not None:
                line["text"] = self._model.show([*ticket.job.tokens, *ticket.generated])
            _log.info(orjson.dumps(line).decode())


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def make_app(front: Front) -> ASGIApp:
    """The application, with everything that a request must pass first."""
    from motley.server.api import ROUTES

    routes = Routes()
    for method, paths, handle in ROUTES:
        for path in paths:
            routes.add(method, path, _endpoint(front, handle))
    page = _page_files() if front.settings.has_page else {}
    for path, file in page.items():
        routes.add("GET", path, _file_endpoint(file))
    return Guard(routes, front.settings, is_public=page.__contains__)


async def _received(receive: Receive) -> bytes:
    """The body of a request."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _endpoint(front: Front, handle: Handle) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            return await handle(front, request)
        except ApiError as error:
            return error_reply(error)
        except MotleyError as error:
            return error_reply(of_motley(error))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a bug: the client gets an error, other requests continue
            _log.exception("a request failed: %s %s", request.method, request.url.path)
            return error_reply(ApiError(500, f"internal error: {type(error).__name__}"))

    return endpoint


def _page_files() -> dict[str, Path]:
    """The files of the page, by path; `/` is its index, and `/docs` shows the description of the API."""
    files = {f"/{file.name}": file for file in sorted(PAGE.glob("*")) if file.is_file()}
    return files | {"/": files["/index.html"], "/docs": files["/docs.html"]}


def _file_endpoint(file: Path) -> Endpoint:
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"

    async def endpoint(request: Request) -> Response:
        stat = file.stat()
        tag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
        headers = {
            "etag": tag,
            "cache-control": "no-cache",
            "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
        }
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(file.read_bytes(), media_type=kind, headers=headers)

    return endpoint


async def health(front: Front, request: Request) -> Response:
    """Answers from what the front knows: also while the model loads, and under load."""
    if front.is_ready and front.engine.stats.get("loss"):
        return error_reply(ApiError(503, front.engine.stats["loss"], headers={"Retry-After": "1"}))
    if front.is_ready:
        return JSON({"status": "ok"})
    if front.engine.state == DEAD:
        return error_reply(ApiError(503, "the engine has ended"))
    loading: dict[str, Any] = front.engine.loading
    total = loading["total"]
    progress = {
        "what": loading["what"],
        "done": loading["done"],
        "total": total,
        "fraction": loading["done"] / total if total else 0.0,
    }
    error = ApiError(503, "Loading model", headers={"Retry-After": "1"}, progress=progress)
    return error_reply(error)
