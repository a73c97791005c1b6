"""Embeddings of texts: pooled hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from motley.engine.checks import shorten
from motley.errors import RequestError

Rows = npt.NDArray[np.float32]  # (tokens, embd)

POOLINGS: Mapping[str, Callable[[Rows], Rows]] = {
    "mean": lambda rows: rows.mean(0, dtype=np.float64).astype(np.float32),
    "last": lambda rows: rows[-1],
    "cls": lambda rows: rows[0],
    "none": lambda rows: rows,
}
_POOLING_TYPES = ("none", "mean", "cls", "last")  # as GGUF numbers them


def choose_pooling(pooling: str | None, metadata: Mapping[str, object], architecture: str) -> str:
    """The requested pooling, or that of the model file, or the mean. RequestError for an unknown one."""
    if pooling is None:
        number = metadata.get(f"{architecture}.pooling_type")
        if isinstance(number, int) and 0 < number < len(_POOLING_TYPES):
            return _POOLING_TYPES[number]
        return "mean"
    if pooling not in POOLINGS:
        raise RequestError(f"pooling is {shorten(pooling)}", hint=f"there are: {', '.join(POOLINGS)}")
    return pooling


def pooled(rows: Rows, pooling: str, normalize: bool) -> Rows:
    """One vector, or one for each token with the pooling "none"; of length 1 if `normalize`."""
    result = POOLINGS[pooling](rows)
    if not normalize:
        return result
    lengths = np.linalg.norm(result.astype(np.float64), axis=-1, keepdims=True)
    unit: Rows = (result / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
    return unit
