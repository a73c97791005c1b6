"""The memory of activations: offsets into one arena, reused as soon as their last reader has run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from motley.graph import HANDLES, Tensor
from motley.plan.fusion import is_given
from motley.plan.stages import Stage

ALIGNMENT = 64  # bytes: a cache line, and enough for any vector load
_ITEM_BYTES = 4  # activations are f32 or i32

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Buffer:
    """Memory that is in use from one stage to another, both included. One that is never read ends where it begins."""

    n_bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class MemoryLayout(Generic[K]):
    """Byte offsets of buffers in an arena."""

    offsets: Mapping[K, int]
    n_bytes: int


def base_of(tensor: Tensor) -> Tensor:
    """The tensor whose memory `tensor` is a view of, or itself."""
    while tensor.op.is_view:
        tensor = tensor.inputs[0]
    return tensor


def owns_memory(tensor: Tensor) -> bool:
    """Whether the arena has to hold it: not inputs, weights, constants, views or cache handles."""
    return not (is_given(tensor) or tensor.op.is_view or tensor.dtype in HANDLES)


def value_buffers(
    stages: Sequence[Stage],
    outputs: Sequence[Tensor],
    reads: Callable[[Stage, Tensor], bool] = lambda stage, tensor: True,
) -> dict[Tensor, Buffer]:
    """The values that stages make, from the stage that makes them to their last reader.

    `reads`: whether a stage reads an input's values (a backend may keep them in another form besides).
    """
    first = {out: i for i, stage in enumerate(stages) for out in stage.outputs if owns_memory(out)}
    last = dict(first)
    for i, stage in enumerate(stages):
        for tensor in stage.inputs:
            base = base_of(tensor)
            if base in first and reads(stage, tensor):
                last[base] = i
    for tensor in outputs:
        if base_of(tensor) in first:
            last[base_of(tensor)] = len(stages)
    return {out: Buffer(out.n_values * _ITEM_BYTES, start, last[out]) for out, start in first.items()}


def lay_out(buffers: Mapping[K, Buffer]) -> MemoryLayout[K]:
    """First fit. Buffers that are in use at the same stage never share memory."""
    offsets: dict[K, int] = {}
    alive: list[tuple[int, int, int]] = []  # (start, stop, last stage), by start
    n_bytes = 0
    for key, buffer in sorted(buffers.items(), key=lambda item: item[1].first):
        alive = [entry for entry in alive if entry[2] >= buffer.first]
        size = -(-buffer.n_bytes // ALIGNMENT) * ALIGNMENT
        offsets[key] = start = _first_gap(alive, size)
        alive.append((start, start + size, buffer.last))
        alive.sort()
        n_bytes = max(n_bytes, start + size)
    return MemoryLayout(offsets, n_bytes)


def _first_gap(alive: Sequence[tuple[int, int, int]], size: int) -> int:
    start = 0
    for low, high, _ in alive:
        if low - start >= size:
            break
        start = max(start, high)
    return start
