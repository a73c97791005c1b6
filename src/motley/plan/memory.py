"""Where each activation lies: offsets into one arena, reused as soon as their last reader has run."""

from __future__ import annotations

from dataclasses import dataclass

from motley.graph import CACHE, Graph, Tensor
from motley.graph.ops import Input, Weight

ALIGNMENT = 64  # bytes: a cache line, and enough for any vector load
_ITEM_BYTES = 4  # activations are f32 or i32


@dataclass(frozen=True)
class MemoryLayout:
    """Byte offset of each activation that owns memory; views share their base's."""

    offsets: dict[Tensor, int]
    n_bytes: int

    def offset(self, tensor: Tensor) -> int:
        return self.offsets[base_of(tensor)]


def base_of(tensor: Tensor) -> Tensor:
    """The tensor whose memory `tensor` is a view of, or itself."""
    while tensor.op.is_view:
        tensor = tensor.inputs[0]
    return tensor


def owns_memory(tensor: Tensor) -> bool:
    """Whether the arena has to hold it: not inputs, weights, constants, views or cache handles."""
    is_given = isinstance(tensor.op, Input | Weight) or tensor.op.is_constant
    return not (is_given or tensor.op.is_view or tensor.dtype == CACHE)


def lay_out(graph: Graph) -> MemoryLayout:
    """First fit over the tensors alive at the same time. An input of a step never shares memory with its output."""
    last_use = {node: step for step, node in enumerate(graph.nodes)}
    for step, node in enumerate(graph.nodes):
        for tensor in node.inputs:
            last_use[base_of(tensor)] = step
        if node.op.is_view:
            last_use[base_of(node)] = step
    for tensor in graph.outputs:
        last_use[base_of(tensor)] = len(graph.nodes)

    offsets: dict[Tensor, int] = {}
    alive: list[tuple[int, int, Tensor]] = []  # (start, stop, tensor), by start
    n_bytes = 0
    for step, node in enumerate(graph.nodes):
        alive = [entry for entry in alive if last_use[entry[2]] >= step]
        if not owns_memory(node):
            continue
        size = -(-node.n_values * _ITEM_BYTES // ALIGNMENT) * ALIGNMENT
        start = _first_gap(alive, size)
        offsets[node] = start
        alive.append((start, start + size, node))
        alive.sort(key=lambda entry: entry[0])
        n_bytes = max(n_bytes, start + size)
    return MemoryLayout(offsets, n_bytes)


def _first_gap(alive: list[tuple[int, int, Tensor]], size: int) -> int:
    start = 0
    for low, high, _ in alive:
        if low - start >= size:
            break
        start = max(start, high)
    return start
