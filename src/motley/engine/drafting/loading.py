"""Loads a draft model on the devices of the model that it drafts for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from motley.backends import Backend
from motley.engine.drafting.draft_model import DraftModel
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
class _Plan:
    spec: ModelSpec
    params: DecoderParams
    context: ContextChoice
    taken: list[int]  # bytes on each device


def without_draft(
    path: str | os.PathLike[str],
    target: ModelSpec,
    crew: Crew,
    backends: Sequence[Backend],
    cache: CacheConfig,
    options: DraftOptions,
) -> Crew:
    """The crew with the memory that the draft model leaves. Loads nothing. ConfigError for another vocabulary."""
    taken = _plan(path, target, crew, backends, cache, options).taken
    devices = []
    names = [device.name for device in crew.devices]
    for index, (device, backend, n_bytes) in enumerate(zip(crew.devices, backends, taken, strict=True)):
        limit = device.memory
        if limit is None and names.count(device.name) == 1:
            limit = backend.free_bytes()
        if limit is not None and limit <= n_bytes:
            raise DeviceError(
                f"device {crew.label(index)} may use {show_bytes(limit)}, and the draft model alone takes "
                f"{show_bytes(n_bytes)}",
                hint="leave out -md, or raise --device-memory",
            )
        devices.append(device if limit is None else replace(device, memory=limit - n_bytes))
    return replace(crew, devices=tuple(devices))


def load_draft_model(
    path: str | os.PathLike[str],
    target: ModelSpec,
    crew: Crew,
    backends: Sequence[Backend],
    cache: CacheConfig,
    options: DraftOptions,
) -> DraftModel:
    """The draft model, loaded on the model's own backends: both share threads and activation memory."""
    plan = _plan(path, target, crew, backends, cache, options)
    fitting = plan.context.fit.plan
    runner = Runner(plan.context.split, backends, fitting, n_threads=options.n_threads)
    manager = CacheManager(fitting.group_specs(), cache.block_size, find_prefixes=False)
    return DraftModel(
        runner, manager, n_ctx=plan.context.n_ctx, n_vocab=plan.params.n_vocab, n_batch=options.n_batch
    )


def _plan(
    path: str | os.PathLike[str],
    target: ModelSpec,
    crew: Crew,
    backends: Sequence[Backend],
    cache: CacheConfig,
    options: DraftOptions,
) -> _Plan:
    if crew.hosts:
        raise ConfigError(
            "a draft model on devices of several hosts is not available yet", hint="leave out -md"
        )
    spec = read_spec(path)
    require_same_vocabulary(spec, target)
    params = read_params(spec)
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
            f"the draft model {spec.path.name} cannot be loaded beside the model: {error.message}",
            hint=error.hint or "leave out -md, or give the devices more memory",
        ) from error
    needs = device_needs(context.split, backends, BatchShape(1, 1))
    taken = [need.weights + context.fit.plan.n_bytes(device) for device, need in enumerate(needs)]
    return _Plan(spec, params, context, taken)


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
