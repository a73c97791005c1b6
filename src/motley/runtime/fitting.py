"""Computes the cache that fits the user's options, the memory budgets and the limits. Loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from motley.backends import Backend
from motley.gguf import ModelSpec
from motley.models import BatchShape, DecoderParams, GraphOptions, rotation_size
from motley.runtime.budget import device_needs, room_for_cache
from motley.runtime.caching import CacheConfig, CachePlan, plan_cache
from motley.runtime.crew import Crew
from motley.runtime.splitting import ModelSplit

MAX_LOGIT_ROWS = 64  # of logits in one pass: more would take more memory than all other activations


def default_context(params: DecoderParams) -> int:
    """The model's own context length in tokens: the default where memory does not matter."""
    return params.n_ctx_train


@dataclass(frozen=True)
class CacheFit:
    """A cache that fits, and the limits that it fits into."""

    plan: CachePlan
    room: tuple[int | None, ...]  # bytes that each device has for it; None: no limit
    n_batch: int


def split_model(
    spec: ModelSpec, params: DecoderParams, crew: Crew, cache: CacheConfig, *, n_ctx: int, rotate: bool
) -> ModelSplit:
    """The split of the model over the crew. With `rotate`, K and V of quantized types are rotated."""
    size = rotation_size(params.head_dim) if rotate else 0
    options = GraphOptions(
        n_ctx,
        k_rotation=size if cache.k_type.is_quantized else 0,
        v_rotation=size if cache.v_type.is_quantized else 0,
    )
    return ModelSplit(spec, params, crew, options)


def fit_cache(
    split: ModelSplit, backends: Sequence[Backend], config: CacheConfig, *, n_batch: int, n_parallel: int
) -> CacheFit:
    """The largest cache that fits. Raises, before anything is loaded, if none fits."""
    n_ctx, smallest = split.options.n_ctx, BatchShape(1, 1)
    n_tokens = min(n_batch, n_parallel * n_ctx)
    largest = BatchShape(n_tokens, min(n_tokens, max(n_parallel, MAX_LOGIT_ROWS)))
    room = room_for_cache(split, backends, device_needs(split, backends, largest))
    plan = plan_cache(
        split.graph(smallest),
        [split.share(device, smallest) for device in range(len(split.crew))],
        config,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_parallel=n_parallel,
        room=room,
    )
    return CacheFit(plan, tuple(room), n_batch)
