"""Attention over the KV cache. Storing and attending are two ops, linked by a cache handle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from motley.graph.tensor import CACHE, Op, Shape, Tensor, Way
from motley.graph.values import CachedSequence, CacheLayer, dense
from motley.ownership import Split, State


@dataclass(frozen=True)
class CacheStore(Op):
    """Write the batch's keys and values (tokens, kv heads, dim) into a layer of the cache → the updated layer."""

    name: ClassVar[str] = "cache_store"
    n_inputs: ClassVar[tuple[int, int]] = (3, 3)
    is_view: ClassVar[bool] = True

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        cache, keys, values = inputs
        self.require(cache.dtype == CACHE, "the first input is no cache layer", cache)
        self.require(keys.shape[1:] == cache.shape, "keys do not fit the cache layer", cache, keys)
        self.require(values.shape == keys.shape, "values differ from keys in shape", keys, values)
        return cache.shape

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return CACHE

    def reference(self, inputs: Sequence[Any]) -> CacheLayer:
        cache: CacheLayer = inputs[0]
        cache.write(inputs[1], inputs[2])
        return cache

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        """The cache is split at heads, as the keys are. No other split is possible."""
        cache, keys, values = states
        if isinstance(cache, Split):
            if cache.axis == 0:
                yield Way((cache, Split(1, cache.word), Split(1, cache.word)), cache)
            return
        for state in (keys, values):
            if isinstance(state, Split) and state.axis == 1:
                yield Way(
                    (Split(0, state.word), Split(1, state.word), Split(1, state.word)), Split(0, state.word)
                )


@dataclass(frozen=True)
class Attention(Op):
    """softmax(scale · q·kᵀ) · v for each query over its sequence's cached keys up to its own position.

    q (tokens, heads, dim); the cache holds `heads / group` KV heads. With `window` = w a query at position p sees
    the keys at positions p-w+1 … p. A third input (heads,) holds attention sinks: one more unscaled score
    per head, which adds to the softmax's sum and has no value.

    The rows of a sequence may be a tree of alternative continuations: then a row sees the tokens before the batch and,
    of the batch's rows, only its ancestors and itself (`CachedSequence.seen`). Its position is that of its depth.
    """

    name: ClassVar[str] = "attention"
    n_inputs: ClassVar[tuple[int, int]] = (2, 3)
    tolerance: ClassVar[float] = 1e-4
    scale: float
    window: int | None = None

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        q, cache, *sinks = inputs
        self.require(cache.dtype == CACHE and len(q.shape) == 3, "needs queries and a cache layer", q, cache)
        kv_heads, dim = cache.shape
        self.require(q.shape[2] == dim, "queries and keys differ in dim", q, cache)
        is_grouped = q.shape[1] % kv_heads == 0 if kv_heads else q.shape[1] == 0
        self.require(is_grouped, "query heads are no multiple of KV heads", q, cache)
        self.require(all(s.shape == q.shape[1:2] for s in sinks), "needs one sink for each head", *inputs)
        return q.shape

    def reference(self, inputs: Sequence[Any]) -> torch.Tensor:
        q: torch.Tensor = inputs[0]
        cache: CacheLayer = inputs[1]
        sinks = dense(inputs[2]) if len(inputs) > 2 else None
        out = torch.zeros_like(q)
        if q.shape[1]:
            for sequence in cache.sequences():
                out[sequence.rows] = self._attend(q[sequence.rows], sequence, sinks)
        return out

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        """Split at KV heads: a KV head and its group of query heads are on the same device."""
        q, cache, *sinks = inputs
        kv = states[1]
        if isinstance(kv, Split) and kv.axis == 0:
            heads = Split(1, kv.word.stretch(q.shape[1] // cache.shape[0]))
            yield Way((heads, kv, *(Split(0, heads.word) for _ in sinks)), heads)

    def _attend(self, q: torch.Tensor, sequence: CachedSequence, sinks: torch.Tensor | None) -> torch.Tensor:
        keys, values = sequence.read()  # (context, kv heads, dim)
        n_tokens, n_heads, dim = q.shape
        grouped = q.reshape(n_tokens, keys.shape[1], -1, dim)
        scores = torch.einsum("tkgd,ckd->kgtc", grouped, keys) * self.scale
        distance = sequence.positions[:, None] - sequence.key_positions[None, :]  # (tokens, context)
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        if sequence.seen is not None:
            visible[:, -n_tokens:] &= sequence.seen
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            sink = sinks.view(keys.shape[1], -1, 1, 1).expand(-1, -1, n_tokens, 1)
            scores = torch.cat([scores, sink], -1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[0]]
        return torch.einsum("kgtc,ckd->tkgd", weights, values).reshape(n_tokens, n_heads, dim)
