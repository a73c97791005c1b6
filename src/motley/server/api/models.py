"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from motley.server.front import Front
from motley.server.replies import JSON


async def list_models(front: Front, request: Request) -> Response:
    settings = front.settings
    names = sorted(settings.aliases) or [settings.model_name]
    data = {
        "id": settings.model_name,
        "object": "model",
        "created": int(front.metrics.started),
        "owned_by": "motley",
        "aliases": names,
        "tags": sorted(settings.tags),
        "meta": model_meta(front),
    }
    entry = {
        "name": settings.model_name,
        "model": settings.model_name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": sorted(settings.tags),
        "capabilities": ["completion"],
        "parameters": "",
        "details": {"parent_model": "", "format": "gguf", "family": "", "families": [""]},
    }
    return JSON({"object": "list", "data": [data], "models": [entry]})


def model_meta(front: Front) -> dict[str, Any] | None:
    """Figures of the model; None until it is loaded."""
    if not front.is_ready:
        return None
    info, model = front.engine.info, front.model
    return {
        "n_vocab": info["n_vocab"],
        "n_ctx": info["n_ctx"],
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.n_embd,
        "n_params": info["n_params"],
        "size": info["size"],
    }
