"""Collectives of devices that share one memory: all parts are at hand, and what is mirrored is made once.

Sums are made in the order of devices, as in runtime.group: the same bits on both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from motley.backends.cuda.values import sum_in_order
from motley.graph import Tensor
from motley.split.collectives import AllGather, AllReduce, Broadcast, ReduceScatter, put, take


def run_collective(
    nodes: Sequence[Tensor], parts: Sequence[torch.Tensor | None], members: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """The result of a collective for each device that takes part; `nodes` and `parts` are the devices' own. Results may
    share memory. `members`: these devices; default: all of the crew.
    """
    devices = list(range(len(nodes)) if members is None else members)
    match nodes[0].op:
        case AllReduce():
            return [_sum(parts)] * len(nodes)
        case ReduceScatter(axis, word, _):
            total = _sum(parts)
            return [take(total, axis, word, device) for device in devices]
        case AllGather(axis, word):
            whole = _some(parts[0]).new_empty(nodes[0].shape)
            for device, part in zip(devices, parts, strict=True):
                put(whole, _some(part), axis, word, device)
            return [whole] * len(nodes)
        case Broadcast(root, _, _):
            sent = _some(parts[devices.index(root)])
            return [sent.clone()] * len(nodes)  # the root may write over its own
    raise AssertionError(f"{nodes[0].op.name} is no collective of all devices")


def _sum(parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return sum_in_order([_some(part) for part in parts])


def _some(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a device has brought nothing"
    return tensor
