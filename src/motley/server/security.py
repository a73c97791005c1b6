"""The checks that a request must pass before any handler sees it: Host, CORS, keys, the size and speed of its body."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motley.server.errors import ApiError
from motley.server.replies import error_reply
from motley.server.settings import ServerSettings

PUBLIC = frozenset({"/health", "/v1/health", "/openapi.json"})
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class HeaderName(bytes):
    """A header's name that keeps its capitals: uvicorn calls `lower()`, and some clients compare names exactly."""

    def lower(self) -> HeaderName:
        return self


class Guard:
    """ASGI middleware. `is_public(path)`: files of the page, which need no key."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, is_public: Callable[[str], bool]) -> None:
        self._app = app
        self._settings = settings
        self._is_public = is_public
        self._keys = [key.encode() for key in settings.api_keys]
        # DNS rebinding: a page of another site resolves its own name to this machine. With a key it gets nothing.
        self._checks_host = is_loopback(settings.host) and not self._keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        origin = headers.get(b"origin", b"").decode("latin-1")
        cors = self._cors(origin)

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start" and cors:
                message = {**message, "headers": [*message["headers"], *cors]}
            await send(message)

        try:
            self._check(scope, headers)
        except ApiError as error:
            await error_reply(error)(scope, receive, send_with_cors)
            return
        if scope["method"] == "OPTIONS":
            await _options(send_with_cors)
            return
        await self._app(scope, self._limited(headers, receive), send_with_cors)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._checks_host and not is_loopback(_host_name(headers.get(b"host", b"").decode("latin-1"))):
            raise ApiError(403, "the Host header names another machine")
        if scope["method"] == "OPTIONS" or scope["path"] in PUBLIC or self._is_public(scope["path"]):
            return
        if self._keys and not self._has_key(headers):
            raise ApiError(401, "Invalid API Key", headers={"WWW-Authenticate": "Bearer"})

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        """Compares with all keys, in a time that does not depend on where they differ."""
        given = headers.get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        candidates = [token.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"")]
        matches = [hmac.compare_digest(candidate, key) for candidate in candidates for key in self._keys]
        return any(matches)

    def _cors(self, origin: str) -> list[tuple[bytes, bytes]]:
        if not origin or not self._allows(origin):
            return []
        return [
            (HeaderName(b"Access-Control-Allow-Origin"), origin.encode("latin-1")),
            (HeaderName(b"Access-Control-Allow-Credentials"), b"true"),
            (HeaderName(b"Access-Control-Allow-Methods"), b"GET, POST, DELETE, OPTIONS"),
            (HeaderName(b"Access-Control-Allow-Headers"), b"*"),
            (HeaderName(b"Vary"), b"Origin"),
        ]

    def _allows(self, origin: str) -> bool:
        for allowed in self._settings.cors_origins:
            if allowed == "*" or allowed == origin:
                return True
            if allowed == "localhost" and _is_local_origin(origin):
                return True
        return False

    def _limited(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """`receive` that refuses a body that is too large or too slow."""
        limit, seconds = self._settings.limits.body_bytes, self._settings.limits.body_seconds
        length = headers.get(b"content-length", b"0")
        n_received, is_complete = 0, False

        async def receive_limited() -> Message:
            nonlocal n_received, is_complete
            if is_complete:
                return await receive()  # waits for the client to leave
            if length.isdigit() and int(length) > limit:
                raise too_large(limit)
            try:
                async with asyncio.timeout(seconds):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not come within {seconds:.0f} s") from None
            n_received += len(message.get("body", b""))
            if n_received > limit:
                raise too_large(limit)
            is_complete = not message.get("more_body", False)
            return message

        return receive_limited


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes")


def is_loopback(host: str) -> bool:
    if host in _LOCAL_NAMES or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_local_origin(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and (parts.hostname or "") in _LOCAL_NAMES
    except ValueError:
        return False


async def _options(send: Callable[[Message], Awaitable[None]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
