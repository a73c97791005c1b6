"""The FFN of chosen experts for many tokens, on the tensor cores: slots (token, choice) are sorted by expert.

    groups           slots in the order of their experts, cut into blocks of BM slots of one expert
    grouped_hidden   for each slot with expert e:  hidden = function(gate[e] · x, up[e] · x)
    grouped_down     for each slot:                weight · (down[e] · hidden)

A program multiplies one block of slots with a tile of its expert's rows, so an expert's weights are read once for each
BM slots that use it, not once for each token. No shape depends on the routing: there are as many blocks as any routing
could need, and those that this one does not need return at once. Slots whose id is -1 are in no block. The caller sums
up each token's slots, in their order. Reference: graph.ops.ExpertFfn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import INTERPRETED
from motley.backends.cuda.kernels.experts import gate_values
from motley.backends.cuda.kernels.matmul import tile_products
from motley.backends.cuda.kernels.pipeline import launch
from motley.backends.cuda.kernels.rows import HALVES, Rows
from motley.backends.cuda.planes import BLOCK, WeightPlanes

_ROWS, _BLOCKS = 64, 32  # of a program's tile of weights: rows, blocks of columns
MIN_TOKENS = 9  # with fewer, most experts have one token, and `experts` reads them as fast


@dataclass(frozen=True, eq=False)
class Groups:
    """Blocks of slots. All int32, on the device."""

    order: torch.Tensor  # (slots,): slots by expert; those without an expert are last
    experts: torch.Tensor  # (blocks,): of each block; -1: the block is not needed
    starts: torch.Tensor  # (blocks,): its first place in `order`
    stops: torch.Tensor  # (blocks,): the end of its expert's slots in `order`
    size: int  # slots of a block

    @property
    def n_blocks(self) -> int:
        return self.experts.shape[0]


def block_size(n_slots: int, n_experts: int) -> int:
    """Slots of a block: large ones if experts have many slots each. Only two sizes, as each is a compiled variant."""
    return 16 if n_slots <= 16 * n_experts else 64


def groups(ids: torch.Tensor, n_experts: int) -> Groups:
    """The blocks for ids (tokens, k), without a copy to the host."""
    n_slots = ids.numel()
    size = block_size(n_slots, n_experts)
    keys = torch.where(ids < 0, n_experts, ids).flatten()
    by_expert, order = torch.sort(keys, stable=True)
    bounds = torch.searchsorted(by_expert, torch.arange(n_experts + 1, device=ids.device, dtype=keys.dtype))
    counts = (bounds[1:] - bounds[:-1] + size - 1) // size  # blocks of each expert
    ends = counts.cumsum(0)
    # Each expert with slots may leave one block that is not full.
    block = torch.arange(n_slots // size + min(n_experts, n_slots), device=ids.device)
    expert = torch.searchsorted(ends, block, right=True)
    is_needed = expert < n_experts
    expert = expert.clamp(max=n_experts - 1)
    starts = bounds[expert] + (block - (ends - counts)[expert]) * size
    return Groups(
        order.int(),
        torch.where(is_needed, expert, -1).int(),
        starts.int(),
        bounds[expert + 1].int(),
        size,
    )


@triton.jit
def _hidden(
    gate, gate_high, gate_scale, up, up_high, up_scale, x, x_scale, x_total, gate_bias, up_bias,
    order, experts, starts, stops, out, n_rows,
    K: tl.constexpr, BLOCKS: tl.constexpr, GATE_KIND: tl.constexpr, UP_KIND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, FUNCTION: tl.constexpr, HAS_BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    expert = tl.load(experts + block)
    if expert >= 0:
        place = tl.load(starts + block) + tl.arange(0, BM)
        is_slot = place < tl.load(stops + block)
        slot = tl.load(order + place, is_slot, other=0)[None, :].to(tl.int64)
        row = tl.program_id(0) * BN + tl.arange(0, BN)
        n = (expert.to(tl.int64) * n_rows + tl.minimum(row, n_rows - 1))[:, None]
        token, is_slot = slot // K, is_slot[None, :]
        zero = tl.zeros([BN, BM], tl.float32)
        GATE_STEPS: tl.constexpr = (BLOCKS + BB - 1) // BB * (8 if GATE_KIND == "Q8_0" else 4)
        UP_STEPS: tl.constexpr = (BLOCKS + BB - 1) // BB * (8 if UP_KIND == "Q8_0" else 4)
        g = tile_products(
            gate, gate_high, gate_scale, x, x_total, n, token, is_slot, zero, 0, GATE_STEPS,
            BLOCKS, GATE_KIND, BB, PLAIN,
        )  # fmt: skip
        u = tile_products(
            up,
            up_high,
            up_scale,
            x,
            x_total,
            n,
            token,
            is_slot,
            zero,
            0,
            UP_STEPS,
            BLOCKS,
            UP_KIND,
            BB,
            PLAIN,
        )
        s = tl.load(x_scale + token, is_slot, other=0.0)
        g, u = g * s, u * s
        if HAS_BIAS:
            g += tl.load(gate_bias + n)
            u += tl.load(up_bias + n)
        at = slot * n_rows + row[:, None]
        tl.store(out + at, gate_values(g, u, FUNCTION), is_slot & (row < n_rows)[:, None])


@triton.jit
def _down(
    down, high, scale, x, x_scale, x_total, bias, weights, order, experts, starts, stops, out, n_rows,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    HAS_BIAS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    expert = tl.load(experts + block)
    if expert >= 0:
        place = tl.load(starts + block) + tl.arange(0, BM)
        is_slot = place < tl.load(stops + block)
        slot = tl.load(order + place, is_slot, other=0)[None, :].to(tl.int64)
        row = tl.program_id(0) * BN + tl.arange(0, BN)
        n = (expert.to(tl.int64) * n_rows + tl.minimum(row, n_rows - 1))[:, None]
        is_slot = is_slot[None, :]
        STEPS: tl.constexpr = (BLOCKS + BB - 1) // BB * (8 if KIND == "Q8_0" else 4)
        acc = tile_products(
            down, high, scale, x, x_total, n, slot, is_slot, tl.zeros([BN, BM], tl.float32), 0, STEPS,
            BLOCKS, KIND, BB, PLAIN,
        )  # fmt: skip
        acc *= tl.load(x_scale + slot, is_slot, other=0.0)
        if HAS_BIAS:
            acc += tl.load(bias + n)
        acc *= tl.load(weights + slot, is_slot, other=0.0)
        tl.store(out + slot * n_rows + row[:, None], acc, is_slot & (row < n_rows)[:, None])


def _planes(weight: WeightPlanes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert weight.is_packed, weight.kind
    assert weight.scale is not None
    return weight.codes, weight.codes if weight.high is None else weight.high, weight.scale


def grouped_hidden(
    gate: WeightPlanes,
    up: WeightPlanes,
    n_experts: int,
    x: Rows,
    k: int,
    found: Groups,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    function: str = "silu",
) -> torch.Tensor:
    """hidden (tokens · k, ff) float32, undefined for slots without an expert. x: (tokens, embd) as HALVES."""
    n_rows = gate.n_rows // n_experts
    assert (gate.n_rows, gate.n_columns) == (up.n_rows, up.n_columns)
    assert (x.form, x.n_columns) == (HALVES, gate.n_columns)
    hidden = torch.empty(x.n_rows * k, n_rows, device=found.order.device)
    launch(
        _hidden[(triton.cdiv(n_rows, _ROWS), found.n_blocks)],
        *_planes(gate), *_planes(up), x.values, x.scale, x.total, *(biases or (hidden, hidden)),
        found.order, found.experts, found.starts, found.stops, hidden, n_rows,
        K=k, BLOCKS=gate.n_columns // BLOCK, GATE_KIND=gate.kind, UP_KIND=up.kind,
        BM=found.size, BN=_ROWS, BB=_BLOCKS, FUNCTION=function, HAS_BIAS=biases is not None,
        PLAIN=INTERPRETED, num_warps=4, num_stages=2,
    )  # fmt: skip
    return hidden


def grouped_down(
    down: WeightPlanes,
    n_experts: int,
    hidden: Rows,
    weights: torch.Tensor,
    found: Groups,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """weight · (down · hidden) (tokens · k, embd) float32, undefined for slots without an expert."""
    n_rows = down.n_rows // n_experts
    assert (hidden.form, hidden.n_columns) == (HALVES, down.n_columns)
    assert weights.is_contiguous()
    out = torch.empty(hidden.n_rows, n_rows, device=found.order.device)
    launch(
        _down[(triton.cdiv(n_rows, _ROWS), found.n_blocks)],
        *_planes(down), hidden.values, hidden.scale, hidden.total, out if bias is None else bias, weights,
        found.order, found.experts, found.starts, found.stops, out, n_rows,
        BLOCKS=down.n_columns // BLOCK, KIND=down.kind, BM=found.size, BN=_ROWS, BB=_BLOCKS,
        HAS_BIAS=bias is not None, PLAIN=INTERPRETED, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
