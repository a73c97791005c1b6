"""How a model is split and why: tensors, bytes and collectives, as plain data. Loads nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypedDict

from motley.graph import CACHE, Tensor
from motley.graph.ops import CacheInput, CacheStore, Weight, cache_layer
from motley.models import BatchShape
from motley.ownership import Mirrored, Split, State
from motley.runtime.loading import lookup_tables, packed_bytes, weight_bytes
from motley.runtime.splitting import ModelSplit
from motley.split.collectives import Broadcast, Receive, Send
from motley.split.infer import SplitGraph
from motley.split.localize import LocalGraph, original_name
from motley.split.transitions import ITEM_BYTES, Transition


class DeviceRow(TypedDict):
    device: str
    asked: float  # share of the model, 0 … 1
    achieved: float
    weights: int  # bytes
    kv_heads: int  # summed over layers


class TensorRow(TypedDict):
    name: str
    kind: str  # weight, cache or activation
    type: str
    shape: list[int]
    state: str
    axis: int | None  # of a split
    owners: list[tuple[int, int]]  # of a split: (device, indices) in order
    bytes: list[int]  # of a weight: on each device


class CollectiveRow(TypedDict):
    kind: str
    tensor: str
    reason: str
    bytes_per_token: int


class Section(TypedDict):
    name: str  # blk.3, or the part before or after the layers
    tensors: list[TensorRow]
    collectives: list[CollectiveRow]


class Explanation(TypedDict):
    model: str
    split_mode: str
    groups: list[list[int]]  # devices that split the tensors of the same layers; empty: no groups
    kv_repeat: int  # how many copies of each KV head are stored
    split_experts: (
        str  # ffn: a part of every expert on each device; whole: whole experts; "": no experts are cut
    )
    split_experts_reason: str
    experts_apart: str  # the sentence about experts on other devices than the rest of their layers; "": none
    devices: list[DeviceRow]
    sections: list[Section]
    collectives: dict[str, int]  # how many of each kind, for one token
    bytes_per_token: int  # moved by all of them


def explain(split: ModelSplit) -> Explanation:
    """The states, bytes and collectives of a split, for one token."""
    batch = BatchShape(1, 1)
    parts = [split.split(batch, group) for group in range(split.n_groups)]
    shares = [split.share(device, batch) for device in range(len(split.crew))]
    mapped = {t.name for t in lookup_tables(split.graph(batch))}
    sections: dict[str, Section] = {}
    for part in parts:
        _add_sections(sections, part, shares, mapped)
    rows = [row for section in sections.values() for row in section["collectives"]]

    total = sum(split.crew.shares)
    loaded = [weight_bytes(share) for share in shares]
    kinds = [row["kind"] for row in rows]
    experts = split.placement.experts
    return Explanation(
        model=str(split.spec.path),
        split_mode=split.crew.mode,
        groups=[list(members) for members in split.crew.groups],
        kv_repeat=split.options.kv_repeat,
        split_experts="" if experts is None else experts.way,
        split_experts_reason="" if experts is None else experts.reason,
        experts_apart=_apart(split),
        devices=[
            DeviceRow(
                device=split.crew.label(i),
                asked=float(split.crew.shares[i] / total),
                achieved=loaded[i] / max(1, sum(loaded)),
                weights=loaded[i],
                kv_heads=sum(t.shape[0] for t in shares[i].graph.inputs if t.dtype == CACHE),
            )
            for i in range(len(split.crew))
        ],
        sections=list(sections.values()),
        collectives={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        bytes_per_token=sum(row["bytes_per_token"] for row in rows),
    )


def _add_sections(
    sections: dict[str, Section], split: SplitGraph, shares: Sequence[LocalGraph], mapped: Collection[str]
) -> None:
    """Adds the tensors and collectives of a group's graph, in the order in which it runs."""
    by_user: dict[Tensor | None, list[Transition]] = {}
    for transition in split.collectives:
        by_user.setdefault(transition.user, []).append(transition)
    section, messages = "", list[CollectiveRow]()
    for node in split.graph.nodes:
        if isinstance(node.op, Send | Receive | Broadcast):
            messages += [*(_collective(t) for t in by_user.get(node, [])), *_message(node)]
            continue
        section = _section(node) or section
        here = sections.setdefault(section, Section(name=section, tensors=[], collectives=[]))
        here["collectives"] += [*messages, *(_collective(t) for t in by_user.get(node, []))]
        messages = []
        if node.name and not any(row["name"] == node.name for row in here["tensors"]):
            here["tensors"].append(_tensor(split, shares, node, is_mapped=node.name in mapped))
    if section:  # otherwise the group has no layers: it only reads the logits
        sections[section]["collectives"] += [*messages, *(_collective(t) for t in by_user.get(None, []))]


def _message(node: Tensor) -> list[CollectiveRow]:
    """A message between groups, of which the receiver tells: none for a sender."""
    op = node.op
    if isinstance(op, Receive):
        reason = (
            f"is on the group of device {op.source}, but the layers from here on are on that of {op.target}"
        )
    elif isinstance(op, Broadcast) and node.inputs:
        reason = f"is on the group of device {op.root}, but the process of the command needs it"
    else:
        return []
    name = node.name.split("→")[0] or "hidden rows"
    return [
        CollectiveRow(
            kind="send" if isinstance(op, Receive) else "broadcast",
            tensor=name,
            reason=reason,
            bytes_per_token=node.n_values * ITEM_BYTES,
        )
    ]


def _apart(split: ModelSplit) -> str:
    apart, crew = split.crew.apart, split.crew
    n_layers = 0 if apart is None else min(apart.n_layers or 0, split.params.n_layers)
    if apart is None or not n_layers:
        return ""
    total = sum(apart.shares)
    holders = [
        crew.label(i) if share == total else f"{float(share / total):.0%} on {crew.label(i)}"
        for i, share in enumerate(apart.shares)
        if share
    ]
    where = f"on {holders[0]}" if apart.owner is not None else ", ".join(holders)
    return f"routed experts of the first {n_layers} layers: {where}"


def _section(node: Tensor) -> str:
    """The section of a tensor by its name; "" if the name does not tell."""
    if node.name.startswith("blk."):
        return ".".join(node.name.split(".")[:2])
    if isinstance(node.op, CacheInput):
        return f"blk.{cache_layer(node)}"
    if node.name.startswith(("output", "logits")):
        return "output"
    return "input" if node.name.startswith(("token", "positions", "embedding")) else ""


def _tensor(split: SplitGraph, shares: Sequence[LocalGraph], node: Tensor, *, is_mapped: bool) -> TensorRow:
    state = _laid_out(split, node)
    is_weight, is_cache = isinstance(node.op, Weight), isinstance(node.op, CacheInput)
    held = _held_states(shares, node) if is_weight else []
    states = held or [str(state)]
    is_split = isinstance(state, Split) and states == [str(state)]
    return TensorRow(
        name=node.name,
        kind="weight" if is_weight else "cache" if is_cache else "activation",
        type=node.dtype,
        shape=list(node.shape),
        state="mapped" if is_mapped else " and ".join(states),
        axis=state.axis if isinstance(state, Split) and is_split else None,
        owners=list(state.word.runs()) if isinstance(state, Split) and is_split else [],
        bytes=[0 if is_mapped else _loaded(share, node) for share in shares],
    )


def _held_states(shares: Sequence[LocalGraph], weight: Tensor) -> list[str]:
    """All states in which devices hold a weight. A weight that layers share may be held in several."""
    states = (
        str(share.layouts[part.name])
        for share in shares
        for part in share.graph.weights
        if original_name(part.name) == weight.name
    )
    return list(dict.fromkeys(states))


def _laid_out(split: SplitGraph, node: Tensor) -> State:
    """The state of a tensor; for a source that inference left mirrored, the state in which its first user reads it.

    A layer's cache has the state in which it is written.
    """
    state = split.state(node)
    if isinstance(node.op, CacheInput):
        stores = (
            user for user in split.graph.nodes if isinstance(user.op, CacheStore) and node in user.inputs
        )
        return next((split.state(store) for store in stores), state)
    if isinstance(state, Mirrored) and isinstance(node.op, Weight):
        return next((t.target for t in split.transitions if t.tensor is node), state)
    return state


def _loaded(share: LocalGraph, weight: Tensor) -> int:
    """Bytes that a device loads of a weight, summed over all states in which the device holds it."""
    return sum(packed_bytes(part) for part in share.graph.weights if original_name(part.name) == weight.name)


def _collective(transition: Transition) -> CollectiveRow:
    user = transition.user
    who = f"{user.op.name} {user.name}".strip() if user is not None else "the graph's output"
    return CollectiveRow(
        kind=transition.kind,
        tensor=transition.tensor.name or transition.tensor.op.name,
        reason=f"is {transition.source}, but {who} takes it {transition.target}",
        bytes_per_token=transition.n_bytes,
    )
