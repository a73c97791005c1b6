"""Errors as clients expect them: {"error": {"message", "type", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from motley.errors import CacheError, ConfigError, MotleyError, RequestError, TemplateError, TokenizerError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_OF_CLIENTS = (RequestError, CacheError, TemplateError, TokenizerError, ConfigError)


class ApiError(Exception):
    """An error to be told to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or _TYPES.get(status, "server_error")
        self.headers = dict(headers or {})
        self.details = details

    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": self.message, "type": self.kind, "code": self.status, **self.details},
        }


def invalid(message: str, **details: Any) -> ApiError:
    return ApiError(400, message, **details)


def not_supported(message: str) -> ApiError:
    return ApiError(501, message)


def context_exceeded(n_prompt: int, n_ctx: int, *, at_least: bool = False) -> ApiError:
    """Clients recognise this error by its words: "exceeds the available context size" is llama-server's, "this model's
    maximum context length is" is OpenAI's.
    """
    counted = f"at least {n_prompt}" if at_least else f"{n_prompt}"
    return ApiError(
        400,
        f"the request ({counted} tokens) exceeds the available context size: this model's maximum context length is "
        f"{n_ctx} tokens (shorten the prompt, or start the server with a larger -c)",
        kind="exceed_context_size_error",
        n_prompt_tokens=n_prompt,
        n_ctx=n_ctx,
    )


def of_motley(error: MotleyError) -> ApiError:
    """A MotleyError of the front: the client's, unless it is about the machine."""
    status = 400 if isinstance(error, _OF_CLIENTS) else 500
    return ApiError(status, str(error))


def of_engine(error: Mapping[str, Any]) -> ApiError:
    """An error that the engine process has described."""
    message = error["message"] + (f" ({error['hint']})" if error.get("hint") else "")
    is_clients = error["kind"] in {kind.__name__ for kind in _OF_CLIENTS}
    return ApiError(400 if is_clients else 500, message)
