"""Paths → endpoints, by one look-up: what a request passes before its endpoint counts for each of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from motley.server.errors import ApiError
from motley.server.replies import error_reply

Endpoint = Callable[[Request], Awaitable[Response]]


class Routes:
    """The ASGI application behind the guard. A path may end with one parameter: `/slots/{slot}`."""

    def __init__(self) -> None:
        self._endpoints: dict[str, dict[str, Endpoint]] = {}  # by path and method
        self._parameters: dict[str, str] = {}  # by what comes before it: its name

    def add(self, method: str, path: str, endpoint: Endpoint) -> None:
        prefix, has_parameter, rest = path.partition("{")
        if has_parameter:
            self._parameters[prefix] = rest.removesuffix("}")
        methods = self._endpoints.setdefault(prefix, {})
        methods[method] = endpoint
        if method == "GET":
            methods["HEAD"] = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        methods, parameters = self._find(scope["path"])
        if (endpoint := methods.get(scope["method"])) is not None:
            scope["path_params"] = parameters
            reply = await endpoint(Request(scope, receive))
        elif not methods and self._find(scope["path"].rstrip("/"))[0]:
            reply = RedirectResponse(Request(scope).url.replace(path=scope["path"].rstrip("/")))
        else:
            status, kind = (405, "not allowed") if methods else (404, "not found")
            reply = error_reply(ApiError(status, f"{scope['method']} {scope['path']} is {kind}"))
        await reply(scope, receive, send)

    def _find(self, path: str) -> tuple[dict[str, Endpoint], dict[str, Any]]:
        """The endpoints of a path by method, and its parameters; no endpoints: there is no such path."""
        if (methods := self._endpoints.get(path)) is not None and path not in self._parameters:
            return methods, {}
        prefix, slash, value = path.rpartition("/")
        if value and (name := self._parameters.get(prefix + slash)) is not None:
            return self._endpoints[prefix + slash], {name: value}
        return {}, {}
