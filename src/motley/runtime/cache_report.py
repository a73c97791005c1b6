"""Memory figures of the KV cache, and of the same cache in other types, for one context length.

Two savings are reported separately: types (bytes per token) and paging (memory only for stored tokens). All figures
of one report are for the same context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from motley.kvcache.results import CacheStats
from motley.kvcache.types import CACHE_TYPES, TILE, CacheType
from motley.runtime.caching import CachePlan, largest, plan_for_one
from motley.runtime.fitting import CacheFit
from motley.runtime.splitting import ModelSplit

_MAX_TOKENS = 1 << 40  # upper bound of the search for the longest context


@dataclass(frozen=True)
class GroupFigures:
    """Figures of one group: layers that share block tables."""

    name: str
    n_layers: int
    window: int | None
    n_blocks: int


@dataclass(frozen=True)
class StateFigures:
    """Figures of the layers with a recurrent state. Bytes are over all devices."""

    state_type: str
    n_layers: int
    n_slots: int  # of sequences and of checkpoints
    slot_bytes: int
    n_rings: int  # for pending tokens of sequences
    ring_bytes: int


@dataclass(frozen=True)
class TypeFigures:
    """K and V both in one type: bytes for the same context, and the longest context in the same bytes."""

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
    bytes_per_token_allocated: float  # as allocated: with padding and repeated KV heads
    context_bytes: int  # one sequence of the whole context, in blocks
    budget: int  # bytes over all devices that bound `longest_context`: the given limit, or the reserved bytes
    longest_context: int | None
    types: tuple[TypeFigures, ...]
    state: StateFigures | None = None  # None: no layer has a recurrent state


@dataclass(frozen=True)
class KVStats:
    """The cache at one moment: its layout, its contents, and its bytes on each device."""

    layout: CacheFigures
    use: CacheStats
    devices: tuple[DeviceFigures, ...]

    @property
    def n_blocks(self) -> int:
        return sum(group.n_blocks for group in self.use.groups if not group.is_state)

    @property
    def n_blocks_used(self) -> int:
        return sum(group.n_used for group in self.use.groups if not group.is_state)

    @property
    def n_blocks_shared(self) -> int:
        return sum(group.n_shared for group in self.use.groups if not group.is_state)

    @property
    def n_tokens(self) -> int:
        return self.use.n_tokens

    @property
    def waste_percent(self) -> float:
        """Per cent of the slots of used blocks that hold no token."""
        n_slots = sum(group.n_slots_used for group in self.use.groups)
        return 100 * sum(group.n_slots_wasted for group in self.use.groups) / n_slots if n_slots else 0.0


def cache_figures(split: ModelSplit, fit: CacheFit, allocated: Sequence[int] | None = None) -> CacheFigures:
    """The figures of a cache. `allocated`: bytes of each group over all devices; None: computed from the plan."""
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
            for n_bytes, group in zip(bytes_of_groups, plan.groups, strict=False)  # states are the last
        ),
        context_bytes=_context_bytes(plan, n_ctx, fit.n_batch),
        budget=budget,
        longest_context=_longest_context(plan, fit, budget),
        types=tuple(_type_figures(split, fit, kind, budget) for kind in CACHE_TYPES.values()),
        state=_state_figures(plan),
    )


def _state_figures(plan: CachePlan) -> StateFigures | None:
    states, devices = plan.states, range(len(plan.heads))
    if states is None:
        return None
    slot, ring = (sum(map(n_bytes, devices)) for n_bytes in (states.slot_bytes, states.ring_bytes))
    return StateFigures(states.kind, len(states.layers), states.n_slots, slot, states.n_rings, ring)


def _type_figures(split: ModelSplit, fit: CacheFit, kind: CacheType, budget: int) -> TypeFigures:
    plan = replace(fit.plan, config=replace(fit.plan.config, k_type=kind, v_type=kind))
    return TypeFigures(
        name=kind.name,
        bytes_per_token=_bytes_by_table(split, kind, kind),
        context_bytes=_context_bytes(plan, split.options.n_ctx, fit.n_batch),
        longest_context=_longest_context(plan, fit, budget),
    )


def _bytes_by_table(split: ModelSplit, k_type: CacheType, v_type: CacheType) -> float:
    """Bytes of one token's K and V in all layers, counting each KV head once and without padding."""
    params = split.params
    n_values = len(params.attention_layers) * params.n_kv_heads * params.head_dim
    return n_values * (k_type.tile_bytes + v_type.tile_bytes) / TILE


def _context_bytes(plan: CachePlan, n_tokens: int, n_batch: int) -> int:
    one = plan_for_one(plan, n_tokens, n_batch)
    return sum(one.n_bytes(device) for device in range(len(plan.heads)))


def _budget(fit: CacheFit) -> int:
    """Bytes that the cache may take: the given limit, or else its planned size."""
    reserved = sum(fit.plan.n_bytes(device) for device in range(len(fit.plan.heads)))
    rooms = [room for room in fit.room if room is not None]
    if fit.plan.config.max_bytes is not None:
        return fit.plan.config.max_bytes
    return sum(rooms) if len(rooms) == len(fit.room) else reserved


def _longest_context(plan: CachePlan, fit: CacheFit, budget: int) -> int | None:
    """The most tokens of one sequence that fit into the devices' room and the budget; None if there is no bound."""

    def fits(n_tokens: int) -> bool:
        one = plan_for_one(plan, n_tokens, fit.n_batch)
        each = [one.n_bytes(device) for device in range(len(plan.heads))]
        return sum(each) <= budget and all(r is None or n <= r for n, r in zip(each, fit.room, strict=True))

    n_tokens = largest(_MAX_TOKENS, fits)
    return None if n_tokens == _MAX_TOKENS else n_tokens  # no bound: every layer has a window
