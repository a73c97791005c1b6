"""The residual between a block that one device has alone and a block of other devices.

A block is a layer's attention, its FFN, or the output matrix. After a block of one device, the residual is on that
device only, and inference would compute the next norm there, and send the norm's result to the next block's devices.
If that block's result can then not be partial (a bias or a norm follows), or belongs to one other device, the residual
has to be sent as well: three collectives in a layer. So the residual is broadcast instead of the norm's result, which
has the same size: then all devices have it from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from motley.graph import Graph, Tensor
from motley.graph.ops import RmsNorm, Weight
from motley.graph.roles import DELTA, EXPERTS, FFN, HEADS, ROUTER, SHARED_FFN, VOCABULARY
from motley.ownership import MIRRORED, State, sole_owner

_ATTENTION, _FEED_FORWARD, _OUTPUT = "attention", "feed_forward", "output"
_KINDS = {
    HEADS: _ATTENTION,
    DELTA: _ATTENTION,
    FFN: _FEED_FORWARD,
    SHARED_FFN: _FEED_FORWARD,
    EXPERTS: _FEED_FORWARD,
    ROUTER: _FEED_FORWARD,
    VOCABULARY: _OUTPUT,
}

_Block = tuple[int | None, str]  # layer and kind


def residual_demands(graph: Graph, states: Mapping[str, State]) -> dict[Tensor, State]:
    """The residuals that all devices need, although one device has the block before. `states`: of weights, by name."""
    owners = _owners(graph, states)
    demands: dict[Tensor, State] = {}
    before: int | None = None
    for residual, block in _entries(graph):
        owner = owners.get(block)
        if before is not None and owner != before:
            demands[residual] = MIRRORED
        before = owner
    return demands


def _entries(graph: Graph) -> Iterator[tuple[Tensor, _Block]]:
    """Each block in order, with the residual that it reads through a norm."""
    seen: set[_Block] = set()
    for node in graph.nodes:
        for norm in node.inputs:
            if not isinstance(norm.op, RmsNorm):
                continue
            for block in filter(None, map(_block_of, node.inputs)):
                if block not in seen:
                    seen.add(block)
                    yield norm.inputs[0], block


def _owners(graph: Graph, states: Mapping[str, State]) -> dict[_Block, int | None]:
    """The device that has all weights of a block that are split; None if there are several devices."""
    found: dict[_Block, set[int | None]] = {}
    for weight in graph.weights:
        state = states.get(weight.name, MIRRORED)
        if (block := _block_of(weight)) is not None and state != MIRRORED:
            found.setdefault(block, set()).add(sole_owner(state))
    return {block: owners.pop() if len(owners) == 1 else None for block, owners in found.items()}


def _block_of(tensor: Tensor) -> _Block | None:
    if not isinstance(tensor.op, Weight) or tensor.op.role.group not in _KINDS:
        return None
    return tensor.op.role.layer, _KINDS[tensor.op.role.group]
