"""Ops that only move values, as strided copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from motley.graph import Op, Tensor
from motley.graph.ops import Concat, Permute, Repeat, Slice
from motley.plan import Single
from motley.split.collectives import Place, Shard

Address = Callable[[Tensor], int]


def _copy_axis(
    program: Any,
    source: int,
    out: int,
    ranges: Iterable[tuple[int, int, int]],
    sizes: tuple[int, int, int, int],
) -> None:
    """Ranges (start in the source, start in the output, length) of an axis; sizes: outer, axis of each, inner."""
    outer, n_source, n_out, inner = sizes
    for start, target, length in ranges:
        program.copy(
            source + 4 * start * inner,
            out + 4 * target * inner,
            (1, outer, length, inner),
            (0, n_source * inner, inner, 1),
            (0, n_out * inner, inner, 1),
        )


def _slice(program: Any, at: Address, stage: Single) -> None:
    op, x = _op(stage, Slice), stage.node.inputs[0]
    outer, n, inner = around(x, op.axis)
    ranges = [(op.start, 0, op.stop - op.start)]
    _copy_axis(program, at(x), at(stage.out), ranges, (outer, n, op.stop - op.start, inner))


def _concat(program: Any, at: Address, stage: Single) -> None:
    axis, done = _op(stage, Concat).axis, 0
    outer, total, inner = around(stage.out, axis)
    for x in stage.node.inputs:
        n = x.shape[axis]
        _copy_axis(program, at(x), at(stage.out), [(0, done, n)], (outer, n, total, inner))
        done += n


def _repeat(program: Any, at: Address, stage: Single) -> None:
    op, x = _op(stage, Repeat), stage.node.inputs[0]
    (outer, n, inner), times = around(x, op.axis), op.times
    program.copy(
        at(x),
        at(stage.out),
        (outer, n, times, inner),
        (n * inner, inner, 0, 1),
        (n * times * inner, times * inner, inner, 1),
    )


def _permute(program: Any, at: Address, stage: Single) -> None:
    op, x = _op(stage, Permute), stage.node.inputs[0]
    strides = _strides(x.shape)
    missing = 4 - len(x.shape)
    program.copy(
        at(x),
        at(stage.out),
        (1,) * missing + stage.out.shape,
        (0,) * missing + tuple(strides[a] for a in op.axes),
        (0,) * missing + _strides(stage.out.shape),
    )


def _shard(program: Any, at: Address, stage: Single) -> None:
    op, x = _op(stage, Shard), stage.node.inputs[0]
    outer, n, inner = around(x, op.axis)
    ranges = [(start, done, n) for start, done, n in _own_ranges(op)]
    _copy_axis(program, at(x), at(stage.out), ranges, (outer, n, stage.out.shape[op.axis], inner))


def _place(program: Any, at: Address, stage: Single) -> None:
    op, x = _op(stage, Place), stage.node.inputs[0]
    outer, n, inner = around(x, op.axis)
    flat = (1, 1, 1, stage.out.n_values)
    program.copy(0, at(stage.out), flat, (0, 0, 0, 1), (0, 0, 0, 1))
    ranges = [(done, start, n) for start, done, n in _own_ranges(op)]
    _copy_axis(program, at(x), at(stage.out), ranges, (outer, n, stage.out.shape[op.axis], inner))


def _op(stage: Single, kind: type[Any]) -> Any:
    assert isinstance(stage.node.op, kind)
    return stage.node.op


def around(tensor: Tensor, axis: int) -> tuple[int, int, int]:
    """Values before an axis, on it, and after it."""
    return prod(tensor.shape[:axis]), tensor.shape[axis], prod(tensor.shape[axis + 1 :])


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _own_ranges(op: Shard | Place) -> list[tuple[int, int, int]]:
    """(start in the whole, start in the part, length) of each of the device's ranges."""
    ranges, done = [], 0
    for start, stop in op.word.global_ranges(op.device):
        ranges.append((start, done, stop - start))
        done += stop - start
    return ranges


COPIES: dict[type[Op], Callable[[Any, Address, Single], None]] = {
    Slice: _slice,
    Concat: _concat,
    Repeat: _repeat,
    Permute: _permute,
    Shard: _shard,
    Place: _place,
}
