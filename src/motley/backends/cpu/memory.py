"""Where the results of stages lie: one arena, reused as soon as a result's last reader has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from motley.backends.cpu.fusion import Linear, Single, Stage
from motley.backends.cpu.native import PLAIN_FORMATS, core
from motley.graph import CACHE, Graph, Tensor
from motley.graph.ops import Attention, Input, RmsNorm, Weight
from motley.plan import base_of

_ALIGNMENT = 64
_MAX_SPLITS = 16  # of a sequence in one attention (csrc/kernels/attention.cpp)
_MAX_SPLIT_ROWS = 64  # tokens beyond which there is enough to do without splits


@dataclass(frozen=True)
class Arena:
    """Byte offsets of tensors' values (float32 or int32), and of their rows quantized for matrix products."""

    values: Mapping[Tensor, int]
    codes: Mapping[Tensor, int]
    splits: Mapping[Tensor, int]  # of attentions: what parts of a sequence come to, before they are joined
    n_bytes: int


@dataclass
class _Span:
    size: int
    first: int  # stage that writes it
    last: int  # stage that reads it last


def uses_codes(stage: Stage, is_exact: bool) -> bool:
    """Whether it reads its input quantized."""
    return (
        isinstance(stage, Linear)
        and not is_exact
        and any(p.weight.dtype not in PLAIN_FORMATS for p in stage.parts)
    )


def uses_values(stage: Stage, is_exact: bool) -> bool:
    """Whether it reads its first input as it is."""
    return not uses_codes(stage, is_exact) or any(
        p.weight.dtype in PLAIN_FORMATS for p in (stage.parts if isinstance(stage, Linear) else ())
    )


def n_split_values(attention: Tensor, n_threads: int) -> int:
    """How many values an attention needs to share out single sequences; 0: there is enough to do without."""
    n_tokens, n_heads, dim = attention.shape
    is_split = n_threads > 1 and n_tokens <= _MAX_SPLIT_ROWS
    return n_tokens * n_heads * (dim + 2) * _MAX_SPLITS if is_split else 0


def lay_out_stages(graph: Graph, stages: Sequence[Stage], n_threads: int, *, is_exact: bool) -> Arena:
    made = {out: (i, stage) for i, stage in enumerate(stages) for out in stage.outputs if _needs_memory(out)}
    values = {out: _Span(_aligned(out.n_values * 4), i, i) for out, (i, _) in made.items()}
    codes: dict[Tensor, _Span] = {}
    unread = set(values)
    for i, stage in enumerate(stages):
        for tensor in stage.inputs:
            base = base_of(tensor)
            if isinstance(stage, Linear) and tensor is stage.x and uses_codes(stage, is_exact):
                n_columns = tensor.shape[-1]
                size = core.quantized_bytes(tensor.n_values // max(n_columns, 1), n_columns)
                first = made[tensor][0] if tensor in made and quantizes(made[tensor][1]) else i
                codes.setdefault(tensor, _Span(_aligned(size), first, i)).last = i
                if first != i and not uses_values(stage, is_exact):
                    continue
            if base in values:
                values[base].last = i
                unread.discard(base)
    for tensor in graph.outputs:
        if base_of(tensor) in values:
            values[base_of(tensor)].last = len(stages)
            unread.discard(base_of(tensor))
    for tensor in unread & set(codes):  # only their codes are read
        del values[tensor]
    splits = {
        stage.node: _Span(_aligned(4 * n_split_values(stage.node, n_threads)), i, i)
        for i, stage in enumerate(stages)
        if isinstance(stage, Single) and isinstance(stage.node.op, Attention)
    }
    spans = sorted(chain(values.values(), codes.values(), splits.values()), key=lambda span: span.first)
    offsets, n_bytes = _place(spans)
    return Arena(
        {tensor: offsets[id(span)] for tensor, span in values.items()},
        {tensor: offsets[id(span)] for tensor, span in codes.items()},
        {tensor: offsets[id(span)] for tensor, span in splits.items()},
        n_bytes,
    )


def quantizes(stage: Stage) -> bool:
    """Whether it can write its result quantized, too."""
    return isinstance(stage, Single) and isinstance(stage.node.op, RmsNorm)


def _needs_memory(tensor: Tensor) -> bool:
    return not (isinstance(tensor.op, Input | Weight) or tensor.op.is_constant or tensor.dtype == CACHE)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _place(spans: Sequence[_Span]) -> tuple[dict[int, int], int]:
    """First fit. Spans that touch the same stage never share memory."""
    offsets: dict[int, int] = {}
    alive: list[tuple[int, _Span]] = []  # by offset
    n_bytes = 0
    for span in spans:
        alive = [entry for entry in alive if entry[1].last >= span.first]
        start = 0
        for offset, other in alive:
            if offset - start >= span.size:
                break
            start = max(start, offset + other.size)
        offsets[id(span)] = start
        alive.append((start, span))
        alive.sort(key=lambda entry: entry[0])
        n_bytes = max(n_bytes, start + span.size)
    return offsets, n_bytes
