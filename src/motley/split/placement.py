"""Placement: the state of each weight, from the requested shares.

Placement uses the weights' roles (graph/roles); the states of activations are inferred. Attention is split at KV heads
with their query groups, an FFN at multiples of the down matrix's quant block, experts like an FFN or as whole experts,
the output matrix at vocabulary rows. Every device looks up embeddings in the mapped file, which reads only the rows
of the batch's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm

from motley.errors import SplitError
from motley.formats import get_format
from motley.graph import Tensor, ops
from motley.graph.ops import CacheInput, StateInput, Weight
from motley.graph.roles import (
    COLUMNS,
    DELTA,
    DELTA_GATES,
    DELTA_HEADS,
    DELTA_KEYS,
    DELTA_VALUES,
    EXPERTS,
    FFN,
    GATED_QUERIES,
    HEADS,
    KEYS,
    OUTPUT,
    QUERIES,
    QUERY_HEADS,
    ROUTER,
    SHARED_FFN,
    VOCABULARY,
    Role,
)
from motley.models import DecoderParams
from motley.ownership import Split, State, Word, sole_owner
from motley.split.apart import ExpertsApart, is_apart, place_apart
from motley.split.apportion import Apportioner, DeadlineApportioner

_LANES = 32  # smallest unit of columns and rows: kernels work on whole vectors

TENSOR, LAYER, NONE = "tensor", "layer", "none"
SPLIT_MODES = (NONE, LAYER, TENSOR)

AUTO, COLUMNS_OF_EACH, WHOLE_EXPERTS = "auto", "ffn", "whole"
EXPERT_SPLITS = (AUTO, COLUMNS_OF_EACH, WHOLE_EXPERTS)
# Columns of each expert are chosen if no device misses its share of a layer's experts by more.
_MAX_SHARE_ERROR = Fraction(1, 20)


@dataclass(frozen=True)
class ExpertSplit:
    """How experts are split, and why."""

    way: str  # COLUMNS_OF_EACH or WHOLE_EXPERTS
    reason: str


@dataclass(frozen=True)
class Placement:
    """States of weights and cache layers by name. Default: mirrored; a cache layer is split as its keys are."""

    states: Mapping[str, State]
    experts: ExpertSplit | None = None  # None: no experts, or no split
    apart: ExpertsApart | None = None  # experts that are not placed with the rest of their layer


def place(
    mode: str,
    weights: Sequence[Tensor],
    params: DecoderParams,
    shares: Sequence[Fraction],
    kv_repeat: int = 1,
    experts: str = AUTO,
    apart: ExpertsApart | None = None,
    *,
    keeps_output_last: bool = False,
) -> Placement:
    """The placement of a graph's weights on `len(shares)` devices; the graph has each KV head `kv_repeat` times.

    `apart`: routed experts of some layers that have shares of their own. `keeps_output_last`: whether the output matrix
    is with the last layer in any case, when whole layers are placed.
    """
    rest = [weight for weight in weights if not is_apart(weight, apart)]
    if mode == TENSOR and len(shares) > 1:
        placed = _TensorPlacement(rest, params, shares, kv_repeat, experts).place()
    else:
        placed = _place_layers(rest, params, shares, keeps_output_last=keeps_output_last)
    if apart is None:
        return placed
    return replace(placed, states={**placed.states, **place_apart(weights, apart)}, apart=apart)


def choose_kv_repeat(weights: Sequence[Tensor], params: DecoderParams, shares: Sequence[Fraction]) -> int:
    """The number of copies of each KV head that gives every device with a share some heads, if the granule allows it.

    With more devices than KV heads, the query heads of one KV head are split over devices, and each of these devices
    stores the KV head. This splits the attention output matrix's columns, which is only possible between quant blocks.
    """
    n_devices = sum(share > 0 for share in shares)
    group = params.n_heads // params.n_kv_heads
    roles = [(role_of(w), w) for w in weights]
    blocks = [_block_size(w) for role, w in roles if role.group == HEADS and role.axis == 1]

    def n_units(repeat: int) -> int:
        sizes = (_head_unit(block, params.head_dim, group // repeat) for block in blocks)
        return min((-(-params.n_kv_heads * repeat // size) for size in sizes), default=0)

    best = 1
    for repeat in (r for r in range(2, group + 1) if group % r == 0):
        if n_units(best) >= n_devices:
            break
        if n_units(repeat) > n_units(best):
            best = repeat
    return best


def _place_layers(
    weights: Iterable[Tensor],
    params: DecoderParams,
    shares: Sequence[Fraction],
    *,
    keeps_output_last: bool,
) -> Placement:
    """Placement by whole layers, in order. Weights after the last layer are on the last layer's device, or on the first
    device, where results are read: on the one that brings the devices' bytes closer to their shares.
    """
    counts = Apportioner(shares).share_out(params.n_layers)
    device_of = [device for device, n in enumerate(counts) for _ in range(n)]
    owners: dict[str, int] = {}
    outputs: list[Tensor] = []
    n_bytes = [0] * len(shares)
    sizes: dict[str, int] = {}
    for weight in weights:
        role = role_of(weight)
        sizes[weight.name] = weight.shape[0]
        if role.layer is not None:
            owners[weight.name] = device_of[role.layer]
            n_bytes[device_of[role.layer]] += _n_bytes(weight)
        elif role.group in (OUTPUT, VOCABULARY):
            outputs.append(weight)
    output_device = device_of[-1]
    if shares[0] and not keeps_output_last:
        n_output = sum(map(_n_bytes, outputs))

        def load(device: int) -> Fraction:
            """The load of the device with the largest load for its share, if `device` gets the output."""
            totals = [n + n_output * (index == device) for index, n in enumerate(n_bytes)]
            return max(total / share for total, share in zip(totals, shares, strict=True) if share)

        output_device = min((output_device, 0), key=load)
    owners |= {weight.name: output_device for weight in outputs}
    return Placement({name: Split(0, Word.of(device, sizes[name])) for name, device in owners.items()})


class _TensorPlacement:
    def __init__(
        self,
        weights: Sequence[Tensor],
        params: DecoderParams,
        shares: Sequence[Fraction],
        kv_repeat: int,
        experts: str,
    ) -> None:
        self._groups: dict[tuple[str, int | None], list[Tensor]] = {}
        for weight in weights:
            role = role_of(weight)
            self._groups.setdefault((role.group, role.layer), []).append(weight)
        self._params = params
        self._shares = shares
        self._repeat = kv_repeat
        self._heads = DeadlineApportioner(
            shares
        )  # KV heads only: the cache is split in the same shares as the model
        self._delta_heads = DeadlineApportioner(shares)  # states are split in the same shares, too
        self._bytes = Apportioner(shares)  # all weights; FFN columns correct the coarse split of heads
        self._states: dict[str, State] = {}
        self._experts = self._choose_expert_split(experts)

    def place(self) -> Placement:
        for layer in range(self._params.n_layers):
            self._place_attention(layer)
            self._place_delta(layer)
            for group in (FFN, SHARED_FFN):
                self._place_columns(self._groups.get((group, layer), []))
            self._place_experts(self._groups.get((EXPERTS, layer), []), self._groups.get((ROUTER, layer), []))
        for output in self._groups.get((VOCABULARY, None), []):
            n_vocab = output.shape[0]
            counts = self._bytes.share_out(*_units(n_vocab, _LANES, [output]))
            self._states[output.name] = Split(0, _word(counts, _LANES, n_vocab))
        return Placement(self._states, self._experts)

    def _place_attention(self, layer: int) -> None:
        weights = self._groups.get((HEADS, layer), [])
        if not weights:
            return
        p, repeat = self._params, self._repeat
        group = p.n_heads // p.n_kv_heads // repeat
        blocks = [_block_size(w) for w in weights if role_of(w).axis == 1]
        unit = _head_unit(max(blocks, default=1), p.head_dim, group)
        n_units, unit_bytes = _units(p.n_kv_heads * repeat, unit, weights)
        counts = self._heads.share_out(n_units)
        self._bytes.record(counts, unit_bytes)
        heads = _word(counts, unit, p.n_kv_heads * repeat)
        self._states[CacheInput.name_of(layer)] = Split(0, heads)
        words = {
            QUERIES: heads.stretch(group * p.head_dim),
            GATED_QUERIES: heads.stretch(group * 2 * p.head_dim),
            KEYS: heads.stretch(p.head_dim),
            QUERY_HEADS: heads.stretch(group),
        }
        for weight in weights:
            self._cut(weight, words)

    def _place_delta(self, layer: int) -> None:
        """Place a delta net's weights and its state, split at key heads with their value heads."""
        weights, p = self._groups.get((DELTA, layer), []), self._params.delta
        if not weights or p is None:
            return
        n_each = p.n_value_heads // p.n_key_heads
        blocks = [_block_size(w) for w in weights if role_of(w).axis == 1]
        # The columns of a key head's values are contiguous, or, in cyclic order, in n_each places.
        unit = _head_unit(max(blocks, default=1), p.head_dim, 1 if p.is_cyclic else n_each)
        n_units, unit_bytes = _units(p.n_key_heads, unit, weights)
        counts = self._delta_heads.share_out(n_units)
        self._bytes.record(counts, unit_bytes)
        keys = _word(counts, unit, p.n_key_heads)
        values = keys.power(n_each) if p.is_cyclic else keys.stretch(n_each)
        words = {
            DELTA_KEYS: keys.stretch(p.head_dim),
            DELTA_VALUES: values.stretch(p.head_dim),
            DELTA_HEADS: values,
            DELTA_GATES: keys.stretch(2 * n_each),
        }
        channels = Word.concat([words[DELTA_KEYS], words[DELTA_KEYS], words[DELTA_VALUES]])
        self._states[StateInput.name_of(layer, ops.CONVOLUTION)] = Split(1, channels)
        self._states[StateInput.name_of(layer, ops.DELTA)] = Split(0, values)
        for weight in weights:
            self._cut(weight, words)

    def _place_columns(self, weights: Sequence[Tensor]) -> None:
        """Place an FFN's weights, or those of every expert, split along the hidden layer."""
        if weights:
            n_columns, unit = _columns(weights)
            counts = self._bytes.share_out(*_units(n_columns, unit, weights))
            for weight in weights:
                self._cut(weight, {COLUMNS: _word(counts, unit, n_columns)})

    def _place_experts(self, weights: Sequence[Tensor], routers: Sequence[Tensor]) -> None:
        """Place a layer's experts. If one device has them all, its router is there, too: see `apart`."""
        if self._experts is None or self._experts.way == COLUMNS_OF_EACH:
            self._place_columns(weights)
        elif weights:
            n_experts = weights[0].shape[0]
            word = _word(self._bytes.share_out(*_units(n_experts, 1, weights)), 1, n_experts)
            for weight in weights:
                self._states[weight.name] = Split(0, word)
        owners = {sole_owner(self._states[weight.name]) for weight in weights}
        if len(owners) == 1 and (owner := owners.pop()) is not None:
            for router in routers:
                self._states[router.name] = Split(0, Word.of(owner, router.shape[0]))

    def _choose_expert_split(self, asked: str) -> ExpertSplit | None:
        """The split that is closer to the shares. Columns of every expert are preferred if they are close enough: then
        all devices have work for every token, whichever experts it uses.
        """
        layers = [weights for (group, _), weights in self._groups.items() if group == EXPERTS]
        if not layers:
            return None
        if asked != AUTO:
            return ExpertSplit(asked, "as asked for")
        columns = max(self._miss(*_columns(weights)) for weights in layers)
        whole = max(self._miss(weights[0].shape[0], 1) for weights in layers)
        is_near = columns <= max(_MAX_SHARE_ERROR, whole)
        found = (
            f"parts of each expert miss a share by {float(columns):.1%}, whole experts by {float(whole):.1%}"
        )
        return ExpertSplit(COLUMNS_OF_EACH if is_near else WHOLE_EXPERTS, found)

    def _miss(self, n: int, unit: int) -> Fraction:
        """The largest deviation of a device from its share of an axis of `n` that is split in whole units."""
        total = sum(self._shares, Fraction(0))
        word = _word(Apportioner(self._shares).share_out(-(-n // unit)), unit, n)
        return max(
            abs(Fraction(word.count(device), n) - share / total) for device, share in enumerate(self._shares)
        )

    def _cut(self, weight: Tensor, words: Mapping[str, Word]) -> None:
        role = role_of(weight)
        state = Split(role.axis, Word.concat(words[unit] for unit in role.units))
        if not state.fits(weight.shape):
            raise SplitError(weight.name, [state], f"does not fit a weight of shape {weight.shape}")
        self._states[weight.name] = state


def role_of(weight: Tensor) -> Role:
    assert isinstance(weight.op, Weight)
    return weight.op.role


def _units(n: int, unit: int, weights: Iterable[Tensor]) -> tuple[int, int]:
    """The number of units of `unit` in an axis of `n` that all these weights have, and the bytes of one unit."""
    n_units = -(-n // unit)
    return n_units, max(1, sum(map(_n_bytes, weights)) // n_units)


def _columns(weights: Sequence[Tensor]) -> tuple[int, int]:
    """The number of columns of these weights' hidden layer, and the smallest unit of a split: whole quant blocks."""
    column_split = [w for w in weights if role_of(w).axis == len(w.shape) - 1]
    return column_split[0].shape[-1], lcm(*(_block_size(w) for w in column_split), _LANES)


def _block_size(weight: Tensor) -> int:
    return get_format(weight.dtype).block_size


def _head_unit(block: int, head_dim: int, group: int) -> int:
    """The smallest number of KV heads whose query heads cover whole quant blocks of the attention output matrix."""
    width = group * head_dim
    return lcm(block, width) // width


def _word(counts: Sequence[int], unit: int, n: int) -> Word:
    """The word of an axis of `n` that was apportioned in units; the last unit may be short."""
    lengths = [count * unit for count in counts]
    last = max(i for i, length in enumerate(lengths) if length)
    lengths[last] -= sum(lengths) - n
    return Word.run(lengths)


def _n_bytes(weight: Tensor) -> int:
    form = get_format(weight.dtype)
    return weight.n_values // form.block_size * form.block_bytes
