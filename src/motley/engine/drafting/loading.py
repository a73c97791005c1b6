"""Loads what drafts for a model, on its devices: a draft model, or the model's own multi-token prediction layer.

Of a crew of several hosts, it runs on the devices of this process: a draft is several passes, each of which would wait
for the network.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from motley.backends import Backend
from motley.engine.drafting.draft_model import DraftModel
from motley.engine.drafting.mtp import NextnLayer
from motley.errors import ConfigError, DeviceError, MotleyError
from motley.gguf import ModelSpec, read_spec
from motley.kvcache.manager import CacheManager
from motley.models import BatchShape, DecoderParams, read_params
from motley.runtime import CacheConfig, Crew, Runner, split_model
from motley.runtime.budget import device_needs, require_host_memory
from motley.runtime.defaults import ContextChoice, choose_context
from motley.units import show_bytes

_TOKENS = "tokenizer.ggml.tokens"
_MAX_PADDING = 128  # tokens: vocabularies of one family are padded to different sizes
_CACHE_PART = 8  # the draft model's cache takes at most an eighth of limited memory


@dataclass(frozen=True)
class DraftOptions:
    """The model's options that also hold for its draft model."""

    n_ctx: int | None
    n_batch: int
    n_parallel: int
    n_threads: int | None
    rotate: bool


@dataclass(frozen=True)
class Companion:
    """A model that drafts for another one."""

    name: str  # for messages
    spec: ModelSpec
    params: DecoderParams


def draft_companion(path: str | os.PathLike[str], target: ModelSpec) -> Companion:
    """The draft model in a file. ConfigError if it has another vocabulary, or states that cannot forget a draft."""
    spec = read_spec(path)
    require_same_vocabulary(spec, target)
    params = read_params(spec)
    if params.delta is not None:
        raise ConfigError(
            f"{spec.path.name} cannot be a draft model: it has layers with a recurrent state, "
            "which cannot forget drafts",
            hint="leave out -md, or take a model without such layers; --spec mtp if the model has nextn layers",
        )
    return Companion(f"draft model {spec.path.name}", spec, params)


def nextn_companion(spec: ModelSpec, params: DecoderParams, crew: Crew) -> Companion:
    """The model's multi-token prediction layer. ConfigError where it cannot run."""
    assert params.n_nextn, "refused before"
    gpus = {device.name for device in crew.devices if device.is_gpu}
    if crew.hosts or len(gpus) > 1 or (gpus and not all(device.is_gpu for device in crew.devices)):
        raise ConfigError(
            "multi-token prediction layers (--spec mtp) run on one GPU or on CPU devices of one host only, so far",
            hint="leave out mtp, or use --device cpu or --device cuda:0",
        )
    return Companion("multi-token prediction layer", spec, params.nextn)


@dataclass(frozen=True)
class _Plan:
    context: ContextChoice
    taken: list[int]  # bytes on each device of this process
    backends: list[Backend]  # of these devices


def without_companion(
    companion: Companion,
    crew: Crew,
    backends: Sequence[Backend],
    cache: CacheConfig,
    options: DraftOptions,
) -> Crew:
    """The crew with the memory that the companion leaves. Loads nothing."""
    taken = dict(zip(crew.members(0), _plan(companion, crew, backends, cache, options).taken, strict=True))
    devices = list(crew.devices)
    names = [device.name for device in crew.devices if device.host is None]
    for index, n_bytes in taken.items():
        device, backend = crew.devices[index], backends[index]
        limit = device.memory
        if limit is None and names.count(device.name) == 1:
            limit = backend.free_bytes()
        if limit is not None and limit <= n_bytes:
            raise DeviceError(
                f"device {crew.label(index)} may use {show_bytes(limit)}, and the {companion.name} alone takes "
                f"{show_bytes(n_bytes)}",
                hint="leave out -md or --spec mtp, or raise --device-memory",
            )
        devices[index] = device if limit is None else replace(device, memory=limit - n_bytes)
    return replace(crew, devices=tuple(devices))


def load_companion(
    companion: Companion,
    crew: Crew,
    backends: Sequence[Backend],
    cache: CacheConfig,
    options: DraftOptions,
) -> DraftModel | NextnLayer:
    """The companion, loaded on the model's own backends: both share threads and activation memory."""
    plan = _plan(companion, crew, backends, cache, options)
    context = plan.context
    runner = Runner(context.split, plan.backends, context.fit.plan, n_threads=options.n_threads)
    # A prediction layer needs hidden states, which a prefix hit does not give.
    finds_prefixes = cache.find_prefixes and not companion.params.is_nextn
    manager = CacheManager(context.fit.plan.group_specs(), cache.block_size, find_prefixes=finds_prefixes)
    if companion.params.is_nextn:
        return NextnLayer(runner, manager, n_ctx=context.n_ctx, n_batch=options.n_batch)
    return DraftModel(
        runner, manager, n_ctx=context.n_ctx, n_vocab=companion.params.n_vocab, n_batch=options.n_batch
    )


def _plan(
    companion: Companion,
    crew: Crew,
    backends: Sequence[Backend],
    cache: CacheConfig,
    options: DraftOptions,
) -> _Plan:
    backends = [backends[device] for device in crew.members(0)]
    crew = crew.local
    spec, params = companion.spec, companion.params
    own = replace(cache, max_tokens=None, max_bytes=_cache_bytes(crew, backends), find_prefixes=False)
    try:
        context = choose_context(
            None if options.n_ctx is None else min(options.n_ctx, params.n_ctx_train),
            lambda n_ctx: split_model(spec, params, crew, own, n_ctx=n_ctx, rotate=options.rotate),
            params,
            backends,
            own,
            n_batch=options.n_batch,
            n_parallel=options.n_parallel,
        )
        require_host_memory(crew, context.fit.plan)
    except MotleyError as error:
        raise DeviceError(
            f"the {companion.name} cannot be loaded beside the model: {error.message}",
            hint=error.hint or "leave out -md or --spec mtp, or give the devices more memory",
        ) from error
    needs = device_needs(context.split, backends, BatchShape(1, 1))
    taken = [need.weights + context.fit.plan.n_bytes(device) for device, need in enumerate(needs)]
    return _Plan(context, taken, backends)


def require_same_vocabulary(draft: ModelSpec, target: ModelSpec) -> None:
    """ConfigError unless both models have the same tokens, one by one. Padding at the end may differ."""
    ours, theirs = draft.metadata.strs(_TOKENS), target.metadata.strs(_TOKENS)
    hint = "a draft model must be of the same family: leave out -md, or take another file"
    for token, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            raise ConfigError(
                f"{draft.path.name} has another vocabulary than {target.path.name}: token {token} is {mine!r:.40}, "
                f"not {other!r:.40}",
                hint=hint,
            )
    if abs(len(ours) - len(theirs)) > _MAX_PADDING:
        raise ConfigError(
            f"{draft.path.name} has {len(ours)} tokens, but {target.path.name} has {len(theirs)}", hint=hint
        )


def _cache_bytes(crew: Crew, backends: Sequence[Backend]) -> int | None:
    """The most bytes of the draft model's cache, if memory is limited."""
    limits = [
        device.memory if device.memory is not None else backend.free_bytes()
        for device, backend in zip(crew.devices, backends, strict=True)
    ]
    known = [limit for limit in limits if limit is not None]
    return sum(known) // _CACHE_PART if known else None
