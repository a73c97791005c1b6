"""One file for each API. `ROUTES`: method, paths, handler."""

from __future__ import annotations

from motley.server.api import (
    anthropic,
    chat,
    completions,
    description,
    embeddings,
    infill,
    llama,
    models,
    responses,
    state,
    tokens,
)
from motley.server.front import Handle, health
from motley.server.live import live

_Route = tuple[str, tuple[str, ...], Handle]

ROUTES: list[_Route] = [
    ("GET", ("/health", "/v1/health"), health),
    ("GET", ("/motley/live",), live),
    ("GET", ("/openapi.json",), description.describe),
    ("GET", ("/v1/models", "/models"), models.list_models),
    ("POST", ("/v1/chat/completions", "/chat/completions"), chat.complete),
    ("POST", ("/v1/completions",), completions.complete),
    ("POST", ("/v1/embeddings",), embeddings.openai),
    ("POST", ("/embedding", "/embeddings"), embeddings.llama),
    ("POST", ("/v1/responses", "/responses"), responses.create),
    ("POST", ("/v1/messages",), anthropic.create),
    ("POST", ("/v1/messages/count_tokens",), anthropic.count_tokens),
    ("POST", ("/completion", "/completions"), llama.complete),
    ("POST", ("/infill",), infill.infill),
    ("POST", ("/tokenize",), tokens.tokenize),
    ("POST", ("/detokenize",), tokens.detokenize),
    ("POST", ("/apply-template",), tokens.apply_template),
    ("POST", ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"), tokens.count_chat),
    ("GET", ("/props",), state.props),
    ("GET", ("/slots",), state.slots),
    ("POST", ("/slots/{slot}",), state.slot_action),
    ("GET", ("/metrics",), state.metrics),
]
