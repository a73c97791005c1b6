"""POST /v1/embeddings, and llama-server's /embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from motley.server.errors import context_exceeded, invalid
from motley.server.fields import Fields
from motley.server.front import Front
from motley.server.prompts import read_prompts
from motley.server.replies import JSON, until_left

Rows = npt.NDArray[np.float32]


async def openai(front: Front, request: Request) -> Response:
    body = await front.body(request)
    if front.settings.pooling == "none":
        raise invalid(
            "pooling none gives a vector for each token, which this API does not know; use /embeddings"
        )
    form = body.text("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise invalid("encoding_format must be float or base64", param="encoding_format")
    prompts = await _prompts(front, body)
    found = await until_left(request.receive, _embed(front, body, prompts, normalize=True))
    n_tokens = sum(map(len, prompts))
    n_dimensions = body.integer("dimensions")
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _encoded(_shortened(row, n_dimensions), form),
        }
        for index, row in enumerate(found)
    ]
    return JSON(
        {
            "object": "list",
            "data": data,
            "model": front.settings.model_name,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }
    )


async def llama(front: Front, request: Request) -> Response:
    """A list with the vectors of each input: one, or with pooling none one for each token."""
    body = await front.body(request)
    prompts = await _prompts(front, body)
    is_whole = front.settings.pooling != "none"
    normalize = is_whole and (body.integer("embd_normalize", 2) or 0) >= 0
    found = await until_left(request.receive, _embed(front, body, prompts, normalize=normalize))
    return JSON(
        [{"index": index, "embedding": np.atleast_2d(rows).tolist()} for index, rows in enumerate(found)]
    )


async def _prompts(front: Front, body: Fields) -> list[tuple[int, ...]]:
    given = body.raw("input", "content")
    prompts, _ = await read_prompts(
        given, front.model, front.settings.limits, n_ctx=front.n_ctx + 1, where="input"
    )
    for tokens in prompts:
        if not tokens:
            raise invalid("input is empty", param="input")
        if len(tokens) > front.n_ctx:
            raise context_exceeded(len(tokens), front.n_ctx)
    return prompts


async def _embed(
    front: Front, body: Fields, prompts: list[tuple[int, ...]], *, normalize: bool
) -> list[Rows]:
    """One call for each input, so that other requests run in between."""
    effort = {name: body.integer(name) for name in ("n_expert_used", "n_layer_exit")}
    found = []
    for tokens in prompts:
        reply = await front.engine.call(
            "embed", tokens=tokens, pooling=front.settings.pooling, normalize=normalize, **effort
        )
        front.metrics.count_prompt(len(tokens), reply["seconds"])
        found.append(np.frombuffer(base64.b64decode(reply["data"]), dtype="<f4").reshape(reply["shape"]))
    return found


def _shortened(row: Rows, n_dimensions: int | None) -> Rows:
    """The first dimensions, of length 1 again."""
    if n_dimensions is None:
        return row
    if not 1 <= n_dimensions <= len(row):
        raise invalid(f"dimensions must be from 1 to {len(row)}", param="dimensions")
    cut = row[:n_dimensions]
    return cut / max(float(np.linalg.norm(cut)), 1e-12)


def _encoded(row: Rows, form: str) -> Any:
    return row.tolist() if form == "float" else base64.b64encode(row.astype("<f4").tobytes()).decode()
