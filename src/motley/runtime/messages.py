"""Collectives of a device beside one native program, such as a GPU beside a CPU, without a thread of the host.

Each collective's messages have their places in memory that both devices read and write (backends.DeviceMessages). Both
devices find the same places: their graphs have the same collectives in the same order. So a GPU's kernels wait for the
CPU by themselves, and a whole decode step is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from motley.backends import DeviceMessages, MessagePlaces
from motley.graph import Graph, Tensor
from motley.plan import Launch
from motley.split.collectives import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Receive,
    ReduceScatter,
    Send,
    put,
)


def places_of(graph: Graph, device: int, reader: int, n_values: int) -> dict[Tensor, MessagePlaces]:
    """The places of all collectives of a device's graph, in a crew of two. Empty: they do not fit into `n_values` in
    each direction, as those of a prompt, or there is one of another kind. `reader`: the only one that reads outputs.
    """
    found: dict[Tensor, MessagePlaces] = {}
    n_used = [0, 0]  # by sender
    for node in graph.nodes:
        if not isinstance(node.op, Collective):
            continue
        if isinstance(node.op, ReduceScatter) or node.op.members:
            return {}
        is_output = any(node is output for output in graph.outputs)
        counts = [0 if is_output and sender == reader else _n_sent(node, sender) for sender in range(2)]
        other = 1 - device
        found[node] = MessagePlaces(not found, n_used[device], counts[device], n_used[other], counts[other])
        n_used = [used + count for used, count in zip(n_used, counts, strict=True)]
    return found if max(n_used) <= n_values else {}


def _n_sent(node: Tensor, sender: int) -> int:
    """The values that a device sends in a collective."""
    match node.op:
        case AllReduce():
            return node.n_values
        case AllGather(axis, word):
            shape = node.shape
            return prod(shape[:axis]) * word.count(sender) * prod(shape[axis + 1 :])
        case Broadcast(root, size):
            return prod(size) if sender == root else 0
        case Send(source, _):
            return node.inputs[0].n_values if sender == source else 0
        case Receive(source, _, size):
            return prod(size) if sender == source else 0
    raise AssertionError(f"{node.op.name} has no messages")


def message_launch(node: Tensor, device: int, places: MessagePlaces, messages: DeviceMessages) -> Launch:
    """How a device that is no native program takes part in a collective: only kernels, which can be captured."""
    op = node.op

    def launch(inputs: Sequence[Any], out: Any) -> Any:
        if places.is_first:
            messages.advance()
        if places.n_sent:
            messages.post(inputs[0], places.sent)
        match op:
            case AllReduce() if places.n_heard:
                messages.fetch(places.heard, out, inputs[0])
            case AllGather(axis, word) if places.n_heard:
                shape = (*out.shape[:axis], word.count(1 - device), *out.shape[axis + 1 :])
                other = torch.empty(shape, dtype=out.dtype, device=out.device)
                messages.fetch(places.heard, other)
                put(out, inputs[0], axis, word, device)
                put(out, other, axis, word, 1 - device)
            case Receive() | Broadcast() if places.n_heard:
                messages.fetch(places.heard, out)
            case AllReduce() | AllGather() | Broadcast() if inputs and inputs[0].shape == out.shape:
                out.copy_(inputs[0])
        return out

    return launch
