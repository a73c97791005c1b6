"""From what the user asked of the cache to the cache that budgets and limits leave room for. Loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from motley.gguf import ModelSpec
from motley.models import BatchShape, DecoderParams, GraphOptions, rotation_size
from motley.runtime.budget import device_needs, room_for_cache
from motley.runtime.caching import CacheConfig, CachePlan, plan_cache
from motley.runtime.crew import Crew
from motley.runtime.splitting import ModelSplit

MAX_LOGIT_ROWS = 64  # of logits in one pass: more would take more memory than all other activations
_DEFAULT_CTX = 4096  # at most, where the model allows more and nobody asked


def default_context(params: DecoderParams) -> int:
    """Tokens a sequence may have, where nobody says how many."""
    return min(params.n_ctx_train, _DEFAULT_CTX)


@dataclass(frozen=True)
class CacheFit:
    """A cache that fits, and what it had to fit into."""

    plan: CachePlan
    room: tuple[int | None, ...]  # bytes that each device has for it; None: no limit
    n_batch: int


def split_model(
    spec: ModelSpec, params: DecoderParams, crew: Crew, cache: CacheConfig, *, n_ctx: int, rotate: bool
) -> ModelSplit:
    """The model on the crew; with `rotate`, K and V are rotated where their type is quantized."""
    size = rotation_size(params.head_dim) if rotate else 0
    options = GraphOptions(
        n_ctx,
        k_rotation=size if cache.k_type.is_quantized else 0,
        v_rotation=size if cache.v_type.is_quantized else 0,
    )
    return ModelSplit(spec, params, crew, options)


def fit_cache(split: ModelSplit, config: CacheConfig, *, n_batch: int, n_parallel: int) -> CacheFit:
    """The largest cache that has room; refuses, before anything is loaded, what cannot be."""
    n_ctx, smallest = split.options.n_ctx, BatchShape(1, 1)
    n_tokens = min(n_batch, n_parallel * n_ctx)
    needs = device_needs(split, BatchShape(n_tokens, min(n_tokens, max(n_parallel, MAX_LOGIT_ROWS))))
    room = room_for_cache(split, needs)
    plan = plan_cache(
        split.split(smallest).graph,
        [split.share(device, smallest) for device in range(len(split.crew))],
        config,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_parallel=n_parallel,
        room=room,
    )
    return CacheFit(plan, tuple(room), n_batch)
