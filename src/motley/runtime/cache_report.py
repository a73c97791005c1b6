"""What the KV cache costs, and what other types would: figures for one context length, side by side.

Two savings are kept apart: types (bytes per token) and paging (memory only for tokens that are there). Nothing here
compares two lengths of context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from motley.kvcache.results import CacheStats
from motley.kvcache.types import CACHE_TYPES, TILE, CacheType
from motley.runtime.caching import CachePlan, largest, plan_for_one
from motley.runtime.fitting import CacheFit
from motley.runtime.splitting import ModelSplit

_MOST_TOKENS = 1 << 40  # where the search for the longest context ends


@dataclass(frozen=True)
class GroupFigures:
    """Layers that share block tables."""

    name: str
    n_layers: int
    window: int | None
    n_blocks: int


@dataclass(frozen=True)
class TypeFigures:
    """K and V both in one type: what that would mean for the same context, and in the same bytes."""

    name: str
    bytes_per_token: float
    context_bytes: int  # one sequence of the whole context, in blocks
    longest_context: int | None  # tokens of one sequence within `CacheFigures.budget`; None: any number


@dataclass(frozen=True)
class DeviceFigures:
    """Bytes of the cache on one device."""

    device: str
    reserved: int
    resident: int  # in memory at this moment


@dataclass(frozen=True)
class CacheFigures:
    """The cache as it is laid out, whether or not anything is in it."""

    cache_type_k: str
    cache_type_v: str
    k_rotation: int  # size of the Hadamard matrix; 0: none
    v_rotation: int
    block_size: int
    n_ctx: int
    groups: tuple[GroupFigures, ...]
    bytes_per_token: float  # in all layers, by the table of types
    bytes_per_token_allocated: float  # as it lies in memory: with padding, and KV heads that are stored twice
    context_bytes: int  # one sequence of the whole context, in blocks
    budget: int  # bytes over all devices that bound `longest_context`: the limit, or else what is reserved
    longest_context: int | None
    types: tuple[TypeFigures, ...]


@dataclass(frozen=True)
class KVStats:
    """The cache at one moment: its layout, what is in it, and its bytes on each device."""

    layout: CacheFigures
    use: CacheStats
    devices: tuple[DeviceFigures, ...]

    @property
    def n_blocks(self) -> int:
        return sum(group.n_blocks for group in self.use.groups)

    @property
    def n_blocks_used(self) -> int:
        return sum(group.n_used for group in self.use.groups)

    @property
    def n_blocks_shared(self) -> int:
        return sum(group.n_shared for group in self.use.groups)

    @property
    def n_tokens(self) -> int:
        return self.use.n_tokens

    @property
    def waste_percent(self) -> float:
        """Slots of used blocks that hold no token, of all slots of used blocks."""
        n_slots = sum(group.n_slots_used for group in self.use.groups)
        return 100 * sum(group.n_slots_wasted for group in self.use.groups) / n_slots if n_slots else 0.0


def cache_figures(split: ModelSplit, fit: CacheFit, allocated: Sequence[int] | None = None) -> CacheFigures:
    """`allocated`: bytes of each group over all devices, where there are arenas to ask; else by the plan."""
    plan, n_ctx = fit.plan, split.options.n_ctx
    config, devices = plan.config, range(len(plan.heads))
    bytes_of_groups = allocated or [
        sum(plan.block_bytes(device, group) for device in devices) * group.n_blocks for group in plan.groups
    ]
    budget = _budget(fit)
    return CacheFigures(
        cache_type_k=config.k_type.name,
        cache_type_v=config.v_type.name,
        k_rotation=split.options.k_rotation,
        v_rotation=split.options.v_rotation,
        block_size=config.block_size,
        n_ctx=n_ctx,
        groups=tuple(GroupFigures(g.name, len(g.layers), g.window, g.n_blocks) for g in plan.groups),
        bytes_per_token=_bytes_by_table(split, config.k_type, config.v_type),
        bytes_per_token_allocated=sum(
            n_bytes / (group.n_blocks * config.block_size)
            for n_bytes, group in zip(bytes_of_groups, plan.groups, strict=True)
        ),
        context_bytes=_context_bytes(plan, n_ctx, fit.n_batch),
        budget=budget,
        longest_context=_longest_context(plan, fit, budget),
        types=tuple(_type_figures(split, fit, kind, budget) for kind in CACHE_TYPES.values()),
    )


def _type_figures(split: ModelSplit, fit: CacheFit, kind: CacheType, budget: int) -> TypeFigures:
    plan = replace(fit.plan, config=replace(fit.plan.config, k_type=kind, v_type=kind))
    return TypeFigures(
        name=kind.name,
        bytes_per_token=_bytes_by_table(split, kind, kind),
        context_bytes=_context_bytes(plan, split.options.n_ctx, fit.n_batch),
        longest_context=_longest_context(plan, fit, budget),
    )


def _bytes_by_table(split: ModelSplit, k_type: CacheType, v_type: CacheType) -> float:
    """What one token's K and V are in all layers, each KV head once and without padding."""
    params = split.params
    n_values = params.n_layers * params.n_kv_heads * params.head_dim
    return n_values * (k_type.tile_bytes + v_type.tile_bytes) / TILE


def _context_bytes(plan: CachePlan, n_tokens: int, n_batch: int) -> int:
    one = plan_for_one(plan, n_tokens, n_batch)
    return sum(one.n_bytes(device) for device in range(len(plan.heads)))


def _budget(fit: CacheFit) -> int:
    """What the cache may take: the given limits, or else what it does take."""
    reserved = sum(fit.plan.n_bytes(device) for device in range(len(fit.plan.heads)))
    rooms = [room for room in fit.room if room is not None]
    if fit.plan.config.max_bytes is not None:
        return fit.plan.config.max_bytes
    return sum(rooms) if len(rooms) == len(fit.room) else reserved


def _longest_context(plan: CachePlan, fit: CacheFit, budget: int) -> int | None:
    """Tokens of one sequence, such that the devices' room and the budget suffice; None if there is no bound."""

    def fits(n_tokens: int) -> bool:
        one = plan_for_one(plan, n_tokens, fit.n_batch)
        each = [one.n_bytes(device) for device in range(len(plan.heads))]
        return sum(each) <= budget and all(r is None or n <= r for n, r in zip(each, fit.room, strict=True))

    n_tokens = largest(_MOST_TOKENS, fits)
    return None if n_tokens == _MOST_TOKENS else n_tokens  # where every layer has a window
