"""The contents of a device's activation memory: values, their rows quantized for products, and room for stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from motley.backends.cpu.native import PLAIN_FORMATS, core
from motley.graph import Graph, Tensor
from motley.graph.ops import Attention, ExpertFfn
from motley.plan import Buffer, Linear, MemoryLayout, Norm, Single, Stage, lay_out, value_buffers

_MAX_SEGMENTS = 16  # of a row in one attention (csrc/kernels/attention.cpp)
_MAX_SPLIT_ROWS = 64  # tokens: with more, threads have enough work without splits


@dataclass(frozen=True)
class Values:
    """A tensor's values (float32 or int32)."""

    tensor: Tensor


@dataclass(frozen=True)
class Codes:
    """A tensor's rows, quantized for matrix products."""

    tensor: Tensor


@dataclass(frozen=True)
class Room:
    """The intermediate values of a node: in an attention, the results of parts of a sequence before they are joined; in
    an expert FFN, rows of tokens and experts.
    """

    node: Tensor


Layout = MemoryLayout[Values | Codes | Room]


def coded_input(stage: Stage, is_exact: bool) -> Tensor | None:
    """The input that it reads quantized."""
    weights = () if is_exact else _matrices_of_input(stage)
    return stage.inputs[0] if any(w.dtype not in PLAIN_FORMATS for w in weights) else None


def reads_values(stage: Stage, is_exact: bool) -> bool:
    """Whether a product reads its input as it is, besides or instead of quantized."""
    return is_exact or any(w.dtype in PLAIN_FORMATS for w in _matrices_of_input(stage))


def _matrices_of_input(stage: Stage) -> tuple[Tensor, ...]:
    """The matrices that a stage multiplies its first input by."""
    match stage:
        case Linear():
            return tuple(part.weight for part in stage.parts)
        case Single(node=node) if isinstance(node.op, ExpertFfn):
            return node.inputs[3:5]  # gate and up
    return ()


def n_split_values(attention: Tensor, n_threads: int) -> int:
    """How many values an attention needs to split single sequences over threads; 0: sequences are not split."""
    n_tokens, n_heads, dim = attention.shape
    is_split = n_threads > 1 and n_tokens <= _MAX_SPLIT_ROWS
    return n_tokens * n_heads * (dim + 2) * _MAX_SEGMENTS if is_split else 0


def lay_out_stages(graph: Graph, stages: Sequence[Stage], n_threads: int, *, is_exact: bool) -> Layout:
    codes = _codes(stages, is_exact)

    def reads(stage: Stage, tensor: Tensor) -> bool:
        """A product of quantized weights reads codes only, where a norm has written them."""
        if tensor is not coded_input(stage, is_exact):
            return True
        return reads_values(stage, is_exact) or not isinstance(stages[codes[tensor].first], Norm)

    values = value_buffers(stages, graph.outputs, reads)
    needed = {t: b for t, b in values.items() if b.last > b.first or t not in codes}
    rooms = {
        stage.node: Buffer(_room_bytes(stage.node, n_threads), i, i)
        for i, stage in enumerate(stages)
        if isinstance(stage, Single) and isinstance(stage.node.op, Attention | ExpertFfn)
    }
    return lay_out(
        {Values(t): b for t, b in needed.items()}
        | {Codes(t): b for t, b in codes.items()}
        | {Room(t): b for t, b in rooms.items()}
    )


def _room_bytes(node: Tensor, n_threads: int) -> int:
    if isinstance(node.op, Attention):
        return 4 * n_split_values(node, n_threads)
    x, ids, _, gate = node.inputs[:4]
    n_tokens, n_embd = x.shape
    n_bytes: int = core.expert_bytes(n_tokens, ids.shape[1], n_embd, gate.shape[1], gate.shape[0])
    return n_bytes


def _codes(stages: Sequence[Stage], is_exact: bool) -> dict[Tensor, Buffer]:
    """The codes of products' inputs: the norm that makes an input writes them, otherwise their first reader."""
    written = {stage.out: i for i, stage in enumerate(stages) if isinstance(stage, Norm)}
    codes: dict[Tensor, Buffer] = {}
    for i, stage in enumerate(stages):
        x = coded_input(stage, is_exact)
        if x is not None:
            n_columns = x.shape[-1]
            size = core.quantized_bytes(x.n_values // max(n_columns, 1), n_columns)
            first = codes[x].first if x in codes else written.get(x, i)
            codes[x] = Buffer(size, first, i)
    return codes
