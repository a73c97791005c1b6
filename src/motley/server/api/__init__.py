"""One file for each API. `ROUTES`: method, paths, handler."""

from __future__ import annotations

from motley.server.api import chat, completions, llama, models
from motley.server.front import Handle, health

_Route = tuple[str, tuple[str, ...], Handle]

ROUTES: list[_Route] = [
    ("GET", ("/health", "/v1/health"), health),
    ("GET", ("/v1/models", "/models"), models.list_models),
    ("POST", ("/v1/chat/completions", "/chat/completions"), chat.complete),
    ("POST", ("/v1/completions",), completions.complete),
    ("POST", ("/completion", "/completions"), llama.complete),
]
