"""The calls of the front to the engine process, besides answers: each is a function of the model and plain data."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from motley.errors import RequestError

if TYPE_CHECKING:
    from motley.llm import LLM


def save(llm: LLM, *, path: str, tokens: list[int]) -> dict[str, Any]:
    started = time.perf_counter()
    n_bytes = llm.save_session(path, tokens)
    return {"n_tokens": len(tokens), "n_bytes": n_bytes, "seconds": time.perf_counter() - started}


def restore(llm: LLM, *, path: str) -> dict[str, Any]:
    started = time.perf_counter()
    tokens = llm.load_session(path)
    return {"tokens": tokens, "seconds": time.perf_counter() - started}


def erase(llm: LLM, *, tokens: list[int], prefix: dict[str, Any]) -> dict[str, Any]:
    """`prefix`: the salt and the numbers of experts and layers of the request that computed them."""
    with suppress(
        RequestError
    ):  # the model does not allow these numbers: the request failed, and left nothing
        llm.forget(tokens, **prefix)
    return {"n_tokens": len(tokens)}


def embed(llm: LLM, *, tokens: list[int], **options: Any) -> dict[str, Any]:
    """The vector as base64 of float32: JSON numbers would be four times as long. `options`: as for `LLM.embed`."""
    started = time.perf_counter()
    rows = llm.embed(tokens, **options)
    data = base64.b64encode(rows.astype("<f4").tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "seconds": time.perf_counter() - started}


CALLS: dict[str, Callable[..., Any]] = {"save": save, "restore": restore, "erase": erase, "embed": embed}
