"""What the front can ask the engine process for, besides answers: each is a function of the model and plain data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


def erase(llm: LLM, *, tokens: list[int]) -> dict[str, Any]:
    llm.forget(tokens)
    return {"n_tokens": len(tokens)}


CALLS: dict[str, Callable[..., Any]] = {"save": save, "restore": restore, "erase": erase}
