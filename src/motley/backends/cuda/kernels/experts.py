"""The FFN of chosen experts, indexed by id: no weight is copied, and no shape depends on the chosen ids.

    expert_hidden   for each (token, slot) with expert e:  hidden = function(gate[e] · x, up[e] · x)
    expert_sum      for each token:                        out = Σ over slots of weight · (down[e] · hidden)

Each product may have a bias of its expert. For many tokens see `grouped_experts`.

A matrix of experts is one matrix of all their rows: expert e's rows begin at e · rows. A slot whose id is -1 is
skipped. Packed weights are multiplied with int8 rows, as in `matvec`; plain ones with float32. One program computes
the sum, in the order of slots. Weights are read once for each token that uses them, which is efficient for few
tokens. Reference: graph.ops.ExpertFfn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import INTERPRETED
from motley.backends.cuda.kernels.matvec import row_products
from motley.backends.cuda.kernels.rows import INT8, PLAIN, Rows
from motley.backends.cuda.planes import BLOCK, WeightPlanes
from motley.backends.cuda.products import plain_values

_TILE_BLOCKS = 256  # rows times blocks per program: eight for each thread of a warp


@triton.jit
def _products(
    codes, high, scale, x, xs, xt, n, vector, quads,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dot products of rows n (BN, 1) with vector number `vector` of x: (BN,)."""
    if KIND == "plain":
        acc = tl.zeros([BN, BB], tl.float32)
        for first in range(0, BLOCKS * 32, BB):
            c = first + tl.arange(0, BB)[None, :]
            inside = c < BLOCKS * 32
            w = tl.load(codes + n * (BLOCKS * 32) + c, inside, other=0.0).to(tl.float32)
            acc += w * tl.load(x + vector * (BLOCKS * 32) + c, inside, other=0.0)
        return tl.sum(acc, 1)
    else:
        return row_products(
            codes, high, scale, x + vector * (BLOCKS * 8), xs + vector * BLOCKS, xt + vector * BLOCKS, n, quads,
            BLOCKS, KIND, BN, BB, INTERPRETED,
        )  # fmt: skip


@triton.jit
def gate_values(g, u, FUNCTION: tl.constexpr):
    """The gate of graph.ops.experts.GATES; a NaN stays one."""
    if FUNCTION == "clamped_swiglu":
        g = tl.where(g > 7.0, 7.0, g)
        u = tl.where(u > 7.0, 7.0, tl.where(u < -7.0, -7.0, u))
        return g / (1.0 + tl.exp(-1.702 * g)) * (u + 1.0)
    else:
        return g / (1.0 + tl.exp(-g)) * u


@triton.jit(do_not_specialize=["quads"])
def _hidden(
    gate, gate_high, gate_scale, up, up_high, up_scale, gate_x, gate_xs, gate_xt, up_x, up_xs, up_xt,
    gate_bias, up_bias, ids, out, n_rows, quads,
    K: tl.constexpr, BLOCKS: tl.constexpr, GATE_KIND: tl.constexpr, UP_KIND: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, FUNCTION: tl.constexpr, HAS_BIAS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + slot)
    if expert >= 0:
        row = tl.program_id(1) * BN + tl.arange(0, BN)
        n = (expert.to(tl.int64) * n_rows + tl.minimum(row, n_rows - 1))[:, None]
        token = slot // K
        g = _products(
            gate, gate_high, gate_scale, gate_x, gate_xs, gate_xt, n, token, quads,
            BLOCKS, GATE_KIND, BN, BB, INTERPRETED,
        )  # fmt: skip
        u = _products(
            up, up_high, up_scale, up_x, up_xs, up_xt, n, token, quads, BLOCKS, UP_KIND, BN, BB, INTERPRETED
        )
        if HAS_BIAS:
            at = expert.to(tl.int64) * n_rows + row
            g += tl.load(gate_bias + at, row < n_rows, other=0.0)
            u += tl.load(up_bias + at, row < n_rows, other=0.0)
        tl.store(out + slot * n_rows + row, gate_values(g, u, FUNCTION), row < n_rows)


@triton.jit(do_not_specialize=["quads"])
def _sum(
    down, high, scale, x, xs, xt, bias, ids, weights, residual, out, n_rows, quads,
    K: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + token * n_rows + row, row < n_rows, other=0.0)
    for i in range(K):
        slot = token * K + i
        expert = tl.load(ids + slot)
        if expert >= 0:
            n = (expert.to(tl.int64) * n_rows + tl.minimum(row, n_rows - 1))[:, None]
            found = _products(down, high, scale, x, xs, xt, n, slot, quads, BLOCKS, KIND, BN, BB, INTERPRETED)
            if HAS_BIAS:
                found += tl.load(bias + expert.to(tl.int64) * n_rows + row, row < n_rows, other=0.0)
            total += tl.load(weights + slot) * found
    tl.store(out + token * n_rows + row, total, row < n_rows)


def operand_form(weight: WeightPlanes) -> str:
    """The form of the activations that a matrix of experts is multiplied with."""
    return INT8 if weight.is_packed else PLAIN


def _planes(weight: WeightPlanes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not weight.is_packed:
        values = plain_values(weight)
        return values, values, values
    assert weight.scale is not None
    return weight.codes, weight.codes if weight.high is None else weight.high, weight.scale


def _operand(x: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.values, x.scale, x.total


def _kind(weight: WeightPlanes) -> str:
    return weight.kind if weight.is_packed else "plain"


def _tile(n_columns: int) -> tuple[int, int]:
    """The number of rows per program, and of a row's blocks per iteration."""
    blocks = max(4, min(128, triton.next_power_of_2(n_columns // BLOCK)))
    return _TILE_BLOCKS // blocks, blocks


def expert_hidden(
    gate: WeightPlanes,
    up: WeightPlanes,
    n_experts: int,
    gate_x: Rows,
    up_x: Rows,
    ids: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    function: str = "silu",
) -> torch.Tensor:
    """hidden (tokens · k, ff) float32, undefined where ids (tokens, k) are -1; x in the forms that gate and up take.

    `biases`: of gate and up, (experts, ff) float32.
    """
    n_rows, k = gate.n_rows // max(n_experts, 1), ids.shape[1]
    assert (gate.n_rows, gate.n_columns) == (up.n_rows, up.n_columns)
    assert (gate_x.form, up_x.form) == (operand_form(gate), operand_form(up))
    assert ids.is_contiguous()
    assert ids.dtype == torch.int32
    rows, blocks = _tile(gate.n_columns)
    hidden = torch.empty(ids.numel(), n_rows, device=ids.device)
    _hidden[(ids.numel(), triton.cdiv(n_rows, rows))](
        *_planes(gate), *_planes(up), *_operand(gate_x), *_operand(up_x), *(biases or (hidden, hidden)), ids, hidden,
        n_rows, 0,
        K=k, BLOCKS=gate.n_columns // BLOCK, GATE_KIND=_kind(gate), UP_KIND=_kind(up), BN=rows, BB=blocks,
        FUNCTION=function, HAS_BIAS=biases is not None, INTERPRETED=INTERPRETED, num_warps=1,
    )  # fmt: skip
    return hidden


def expert_sum(
    down: WeightPlanes,
    n_experts: int,
    hidden: Rows,
    ids: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """out (tokens, embd) float32 from hidden (tokens · k, ff), in the form that down takes. `bias`: (experts, embd)"""
    n_rows, (n_tokens, k) = down.n_rows // max(n_experts, 1), ids.shape
    assert hidden.form == operand_form(down)
    assert weights.is_contiguous()
    rows, blocks = _tile(down.n_columns)
    out = torch.empty(n_tokens, n_rows, device=ids.device)
    _sum[(n_tokens, triton.cdiv(n_rows, rows))](
        *_planes(down), *_operand(hidden), out if bias is None else bias, ids, weights,
        out if residual is None else residual, out, n_rows, 0,
        K=k, BLOCKS=down.n_columns // BLOCK, KIND=_kind(down), BN=rows, BB=blocks,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, INTERPRETED=INTERPRETED, num_warps=1,
    )  # fmt: skip
    return out
