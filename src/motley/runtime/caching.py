"""The size and the layout of the KV cache: groups of layers, blocks, bytes on each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from motley.errors import CacheError, ConfigError
from motley.graph import CACHE, RECURRENT, Graph
from motley.graph.ops import Attention, cache_layer, state_of
from motley.integers import as_int
from motley.kvcache.arena import Arena, LayerGroup
from motley.kvcache.paging import can_page_on_demand
from motley.kvcache.sequences import GroupSpec
from motley.kvcache.state_arena import STATE_TYPES, StateLayout, StatePart
from motley.kvcache.states import StateSpec
from motley.kvcache.types import CacheType
from motley.split.localize import LocalGraph
from motley.units import show_bytes

CPU = torch.device("cpu")
_STATES = "states"  # the name of the group of layers with a recurrent state
N_PENDING = 16  # tokens that a state may be behind its sequence


@dataclass(frozen=True)
class CacheConfig:
    """The user's options for the cache. At most one of the limits is given."""

    k_type: CacheType
    v_type: CacheType
    block_size: int = 32
    max_tokens: int | None = None
    max_bytes: int | None = None  # over all devices
    demand_paged: bool = False
    find_prefixes: bool = True
    state_type: str = "f32"  # of recurrent states

    def __post_init__(self) -> None:
        if self.state_type not in STATE_TYPES:
            raise ConfigError(
                f"unknown type of recurrent states {self.state_type!r}",
                hint=f"there are: {', '.join(STATE_TYPES)}",
            )
        if self.max_tokens is not None and self.max_bytes is not None:
            raise ConfigError(
                "the KV cache is limited both in tokens and in bytes", hint="give one of the two"
            )
        for field, what in (
            ("max_tokens", "kv_cache_tokens"),
            ("max_bytes", "kv_cache_bytes"),
            ("block_size", "kv_block_size"),
        ):
            if (value := getattr(self, field)) is None:
                continue
            if (number := as_int(value)) is None or number < 1:
                raise ConfigError(f"{what} is {value!r:.60}", hint="it must be a whole number of at least 1")
            object.__setattr__(self, field, number)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"a KV cache block of {self.block_size} tokens is not a power of two", hint="try 16, 32, 64"
            )
        if self.max_tokens is not None and self.max_tokens < self.block_size:
            raise ConfigError(
                f"a KV cache of {self.max_tokens} tokens is smaller than a block of {self.block_size}",
                hint="raise --kv-cache-tokens or lower --kv-block-size",
            )


@dataclass(frozen=True)
class CacheGroup:
    """Layers with the same attention window, or all layers without one. They share block tables."""

    window: int | None
    layers: tuple[int, ...]
    n_blocks: int = 0

    @property
    def name(self) -> str:
        return "full" if self.window is None else f"window {self.window}"


@dataclass(frozen=True)
class StatePlan:
    """The slots of recurrent states on the whole crew."""

    kind: str
    layers: tuple[int, ...]
    parts: tuple[tuple[StatePart, ...], ...]  # of each device
    n_slots: int = 1
    n_rings: int = 1

    def layout(self, device: int) -> StateLayout:
        return StateLayout(self.kind, self.parts[device], self.n_slots, self.n_rings, N_PENDING)

    def slot_bytes(self, device: int) -> int:
        """Bytes of one slot on a device."""
        return sum(part.slot_bytes(self.kind) for part in self.parts[device])

    def ring_bytes(self, device: int) -> int:
        """Bytes of one ring on a device."""
        return sum(part.ring_bytes(N_PENDING) for part in self.parts[device])

    def n_bytes(self, device: int) -> int:
        return self.n_slots * self.slot_bytes(device) + self.n_rings * self.ring_bytes(device)

    def sized(self, n_parallel: int, n_checkpoints: int) -> StatePlan:
        """A slot and a ring for each sequence and for one that is saved or scored beside them; and checkpoints."""
        n_live = n_parallel + (n_checkpoints > 0)
        return replace(self, n_slots=n_live + n_checkpoints, n_rings=n_live)


@dataclass(frozen=True)
class CachePlan:
    """The cache's layout on the whole crew."""

    config: CacheConfig
    head_dim: int
    groups: tuple[CacheGroup, ...]
    heads: tuple[dict[int, int], ...]  # for each device: layer → number of its KV heads there
    states: StatePlan | None = None  # None: no layer has a recurrent state

    def group_specs(self) -> list[GroupSpec | StateSpec]:
        """The groups in their order: those with blocks, then the one with states."""
        specs: list[GroupSpec | StateSpec] = [
            GroupSpec(group.name, group.n_blocks, group.window) for group in self.groups
        ]
        if self.states is not None:
            specs.append(StateSpec(_STATES, self.states.n_slots, self.states.n_rings, N_PENDING))
        return specs

    def group_of_layers(self) -> list[int]:
        """The group number of each layer."""
        groups = {layer: i for i, group in enumerate(self.groups) for layer in group.layers}
        if self.states is not None:
            groups |= dict.fromkeys(self.states.layers, len(self.groups))
        return [groups[layer] for layer in sorted(groups)]

    def arena(self, device: int, place: torch.device = CPU) -> Arena:
        """Allocates the device's part of the cache in the memory of `place`."""
        heads = self.heads[device]
        groups = [
            LayerGroup(group.layers, tuple(heads.get(layer, 0) for layer in group.layers), group.n_blocks)
            for group in self.groups
        ]
        is_paged = self.config.demand_paged and can_page_on_demand(place)
        return Arena(
            self.config.k_type,
            self.config.v_type,
            groups,
            block_size=self.config.block_size,
            head_dim=self.head_dim,
            demand_paged=is_paged,
            device=place,
            states=None if self.states is None else self.states.layout(device),
        )

    def block_bytes(self, device: int, group: CacheGroup) -> int:
        """Bytes of one block of a group on a device."""
        n_heads = sum(self.heads[device].get(layer, 0) for layer in group.layers)
        kinds = self.config.k_type, self.config.v_type
        return n_heads * self.config.block_size * sum(kind.head_bytes(self.head_dim) for kind in kinds)

    def n_bytes(self, device: int) -> int:
        states = 0 if self.states is None else self.states.n_bytes(device)
        return states + sum(group.n_blocks * self.block_bytes(device, group) for group in self.groups)


def plan_cache(
    graph: Graph,
    shares: Sequence[LocalGraph],
    config: CacheConfig,
    *,
    n_ctx: int,
    n_batch: int,
    n_parallel: int,
    room: Sequence[int | None],
) -> CachePlan:
    """The plan of the largest cache within the limits. `room`: bytes left for it on each device; None: no limit.

    Full-attention layers get as many tokens as the limit allows, by default all that `n_parallel` sequences of
    `n_ctx` tokens can use. Sliding-window layers get what the windows of those sequences need, layers with a state a
    slot for each sequence, and some more for checkpoints: fewer where a context of `n_ctx` would not fit otherwise.
    """
    plan = plan_layout(graph, shares, config)
    size = config.block_size
    most = n_parallel * -(-n_ctx // size)
    if config.max_tokens is not None:
        most = config.max_tokens // size  # a hard limit: only whole blocks count

    if config.max_bytes is not None:
        most = max(most, config.max_bytes // max(1, _bytes_of_a_block(plan, len(shares))))

    def sized(n_blocks: int, n_checkpoints: int) -> CachePlan:
        return sized_plan(plan, n_blocks, n_batch, n_parallel, n_checkpoints)

    def fits(candidate: CachePlan) -> bool:
        each = [candidate.n_bytes(device) for device in range(len(shares))]
        within_all = config.max_bytes is None or sum(each) <= config.max_bytes
        return within_all and all(r is None or n <= r for n, r in zip(each, room, strict=True))

    enough, best = min(most, -(-n_ctx // size)), (0, 0)
    for n_checkpoints in _numbers_of_checkpoints(plan, n_parallel):
        n_blocks = largest(most, lambda n, more=n_checkpoints: fits(sized(n, more)))  # type: ignore[misc]
        best = max(best, (n_blocks, n_checkpoints))
        if n_blocks >= enough:
            best = n_blocks, n_checkpoints
            break
    if not best[0]:
        needed = [sized(1, 0).n_bytes(device) for device in range(len(shares))]
        limits = [f"{show_bytes(r)} on device {i}" for i, r in enumerate(room) if r is not None]
        if config.max_bytes is not None:
            limits.append(f"{show_bytes(config.max_bytes)} over all")
        states = "" if plan.states is None else f" and the states of {n_parallel} sequences"
        raise CacheError(
            f"the KV cache has no room for a single block of {size} tokens{states}: it takes "
            f"{', '.join(map(show_bytes, needed))} on the crew's devices, and may take {', '.join(limits)}",
            hint="raise --kv-cache-bytes or --device-memory, or choose a smaller cache type or block",
        )
    return sized(*best)


def _numbers_of_checkpoints(plan: CachePlan, n_parallel: int) -> list[int]:
    """Numbers of checkpoints to try, most first."""
    if plan.states is None:
        return [0]
    most = max(4, 2 * n_parallel)
    return [*(most >> i for i in range(most.bit_length())), 0]


def plan_layout(graph: Graph, shares: Sequence[LocalGraph], config: CacheConfig) -> CachePlan:
    """The layout of the cache, without blocks."""
    heads = tuple(_heads(share.graph) for share in shares)
    head_dim = next(node.shape[1] for node in graph.inputs if node.dtype == CACHE)
    return CachePlan(config, head_dim, _groups(graph), heads, _state_plan(graph, shares, config))


def plan_for_one(plan: CachePlan, n_tokens: int, n_batch: int) -> CachePlan:
    """The same layout with just the blocks that one sequence of `n_tokens` needs."""
    n_blocks = -(-n_tokens // plan.config.block_size)
    return sized_plan(plan, n_blocks, n_batch, n_parallel=1, n_checkpoints=0)


def sized_plan(
    plan: CachePlan, n_blocks: int, n_batch: int, n_parallel: int, n_checkpoints: int
) -> CachePlan:
    """The plan with `n_blocks` for full attention, and for windows the blocks that `n_parallel` sequences need."""
    size = plan.config.block_size
    counts = (
        n_blocks if g.window is None else min(n_blocks, n_parallel * (-(-(g.window + n_batch) // size) + 1))
        for g in plan.groups
    )
    groups = tuple(replace(group, n_blocks=n) for group, n in zip(plan.groups, counts, strict=True))
    states = None if plan.states is None else plan.states.sized(n_parallel, n_checkpoints)
    return replace(plan, groups=groups, states=states)


def _bytes_of_a_block(plan: CachePlan, n_devices: int) -> int:
    return sum(plan.block_bytes(device, group) for device in range(n_devices) for group in plan.groups)


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest n ≤ most with fits(n), by bisection; 0 if there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _groups(graph: Graph) -> tuple[CacheGroup, ...]:
    windows: dict[int | None, list[int]] = {}
    for node in graph.nodes:
        if isinstance(node.op, Attention):
            cache = node.inputs[1].inputs[0]
            windows.setdefault(node.op.window, []).append(cache_layer(cache))
    ordered = sorted(windows.items(), key=lambda item: (item[0] is not None, item[0] or 0))
    return tuple(CacheGroup(window, tuple(layers)) for window, layers in ordered)


def _heads(graph: Graph) -> dict[int, int]:
    return {cache_layer(node): node.shape[0] for node in graph.inputs if node.dtype == CACHE}


def _state_plan(graph: Graph, shares: Sequence[LocalGraph], config: CacheConfig) -> StatePlan | None:
    layers = sorted({state_of(node).layer for node in graph.inputs if node.dtype == RECURRENT})
    if not layers:
        return None
    parts = tuple(
        tuple(
            StatePart(node.name, state_of(node).layer, node.shape, state_of(node).pending_shape)
            for node in share.graph.inputs
            if node.dtype == RECURRENT
        )
        for share in shares
    )
    return StatePlan(config.state_type, tuple(layers), parts)
