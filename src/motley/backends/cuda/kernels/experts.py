"""The FFN of chosen experts, indexed by id: no weight is copied, and no shape depends on the chosen ids.

    expert_hidden   for each (token, slot) with expert e:  hidden = function(gate[e] · x, up[e] · x)
    expert_sum      for each token:                        out = Σ over slots of weight · (down[e] · hidden)

Each product may have a bias of its expert. For many tokens see `grouped_experts`.

A matrix of experts is one matrix of all their rows: expert e's rows begin at e · rows. A slot whose id is -1 is
skipped. Packed weights are multiplied with int8 rows, as in `matvec`; plain ones with float32. A program of
`expert_hidden` computes 32 values, which are one block of int8; one of `expert_sum` a few rows of all the token's
experts, and sums them up. Weights are read once for each token that uses them, which is efficient for few tokens.
Reference: graph.ops.ExpertFfn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import INTERPRETED
from motley.backends.cuda.kernels.matvec import block_products, load_blocks, load_vector, row_products
from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.rows import INT8, PLAIN, Rows, store_rows
from motley.backends.cuda.planes import BLOCK, WeightPlanes
from motley.backends.cuda.products import plain_values

_ROWS = 32  # of hidden values per program: a block of int8
_SUM_TILE = 512  # rows of experts times blocks per program
_MANY_TOKENS = 4  # from which a program of `expert_sum` has more rows than it reads at once
_TURNS = 4  # how often it reads some


@triton.jit
def _products(
    codes, high, scale, x, xs, xt, n, vector, quads, ok,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dot products of rows n (BN, 1) with vectors of x, one or (BN, 1) numbers: (BN,). See `row_products`."""
    if KIND == "plain":
        acc = tl.zeros([BN, BB], tl.float32)
        for first in range(0, BLOCKS * 32, BB):
            c = first + tl.arange(0, BB)[None, :]
            inside = c < BLOCKS * 32
            there = inside if ok is None else inside & ok
            w = tl.load(codes + n * (BLOCKS * 32) + c, there, other=0.0).to(tl.float32)
            wait()
            acc += w * tl.load(x + vector * (BLOCKS * 32) + c, inside, other=0.0)
        return tl.sum(acc, 1)
    else:
        return row_products(
            codes, high, scale, x + vector * (BLOCKS * 8), xs + vector * BLOCKS, xt + vector * BLOCKS, n, quads,
            BLOCKS, KIND, BN, BB, INTERPRETED, ok,
        )  # fmt: skip


@triton.jit
def _pair_products(
    gate, gate_high, gate_scale, up, up_high, up_scale, x, xs, xt, n, token, quads,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """`_products` of gates and of ups of one kind: their blocks are on their way at the same time."""
    g_acc, u_acc = tl.zeros([BN, BB], tl.float32), tl.zeros([BN, BB], tl.float32)
    zero = tl.zeros([BN, BB], tl.int32)
    for first in range(0, BLOCKS, BB):
        b = first + quads * 4 + tl.arange(0, BB)[None, :]  # see `row_products`
        inside = b < BLOCKS
        g, gw, g0, g1 = load_blocks(gate, gate_high, gate_scale, n, b, inside, BLOCKS, KIND)
        u, uw, u0, u1 = load_blocks(up, up_high, up_scale, n, b, inside, BLOCKS, KIND)
        v, s, t = load_vector(
            x + token * (BLOCKS * 8), xs + token * BLOCKS, xt + token * BLOCKS, b, inside, BLOCKS, KIND
        )
        g_acc += block_products(g, gw, g0, g1, v, s, t, zero, KIND, PLAIN)
        u_acc += block_products(u, uw, u0, u1, v, s, t, zero, KIND, PLAIN)
    return tl.sum(g_acc, 1), tl.sum(u_acc, 1)


@triton.jit
def gate_values(g, u, FUNCTION: tl.constexpr):
    """The gate of graph.ops.experts.GATES; a NaN stays one."""
    if FUNCTION == "clamped_swiglu":
        g = tl.where(g > 7.0, 7.0, g)
        u = tl.where(u > 7.0, 7.0, tl.where(u < -7.0, -7.0, u))
        return g / (1.0 + tl.exp(-1.702 * g)) * (u + 1.0)
    else:
        return g / (1.0 + tl.exp(-g)) * u


@triton.jit
def local_ids(ids, first, n_experts):
    """Ids of this device's experts, counted from its first one; -1 for others. Reference: graph.ops.LocalIds."""
    return tl.where((ids >= first) & (ids < first + n_experts), ids - first, -1)


@triton.jit(do_not_specialize=["quads", "first_expert", "n_experts"])
def _hidden(
    gate, gate_high, gate_scale, up, up_high, up_scale, gate_x, gate_xs, gate_xt, up_x, up_xs, up_xt,
    gate_bias, up_bias, ids, values, scale, total, n_rows, quads, first_expert, n_experts,
    K: tl.constexpr, BLOCKS: tl.constexpr, GATE_KIND: tl.constexpr, UP_KIND: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, OUT_BLOCKS: tl.constexpr, FORM: tl.constexpr, FUNCTION: tl.constexpr,
    HAS_BIAS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    wait()
    let_next_start()  # not before: `_sum` may then read the ids without waiting for this kernel
    slot, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    expert = local_ids(tl.load(ids + slot), first_expert, n_experts)
    if expert >= 0:
        row = tile * BN + tl.arange(0, BN)
        n = (expert.to(tl.int64) * n_rows + tl.minimum(row, n_rows - 1))[:, None]
        token = slot // K
        if GATE_KIND == UP_KIND and GATE_KIND != "plain":
            g, u = _pair_products(
                gate, gate_high, gate_scale, up, up_high, up_scale, gate_x, gate_xs, gate_xt, n, token, quads,
                BLOCKS, GATE_KIND, BN, BB, INTERPRETED,
            )  # fmt: skip
        else:
            g = _products(
                gate, gate_high, gate_scale, gate_x, gate_xs, gate_xt, n, token, quads, None,
                BLOCKS, GATE_KIND, BN, BB, INTERPRETED,
            )  # fmt: skip
            u = _products(
                up, up_high, up_scale, up_x, up_xs, up_xt, n, token, quads, None,
                BLOCKS, UP_KIND, BN, BB, INTERPRETED,
            )  # fmt: skip
        if HAS_BIAS:
            at = expert.to(tl.int64) * n_rows + row
            g += tl.load(gate_bias + at, row < n_rows, other=0.0)
            u += tl.load(up_bias + at, row < n_rows, other=0.0)
        v = gate_values(g, u, FUNCTION)
        if FORM == "int8":
            store_rows(v[None, :], values, scale, total, slot, tile + tl.arange(0, 1), OUT_BLOCKS, FORM)
        else:
            tl.store(values + slot * n_rows + row, v, row < n_rows)


@triton.jit
def _store_sums(
    total,
    row,
    token,
    residual,
    shared,
    gate,
    out,
    n_rows,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """Store values `row` of a token's result, with what is added to them."""
    if HAS_RESIDUAL:
        total += tl.load(residual + token * n_rows + row, row < n_rows, other=0.0)
    if HAS_SHARED:
        share = 1.0 / (1.0 + tl.exp(-tl.load(gate + token)))
        total += share * tl.load(shared + token * n_rows + row, row < n_rows, other=0.0)
    tl.store(out + token * n_rows + row, total, row < n_rows)


@triton.jit(do_not_specialize=["quads", "first_expert", "n_experts"])
def _sum(
    down, high, scale, x, xs, xt, bias, ids, weights, residual, shared, gate, out, n_rows, quads,
    first_expert, n_experts,
    K: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr,
    BB: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SHARED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Right after `_hidden`: ids are older than that, so that weights are loaded while hidden values are computed."""
    let_next_start()
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN
    i = tl.arange(0, SLOTS * BN)  # BN rows of each slot's expert
    choice, row = i // BN, first + i % BN
    slot = token * K + choice
    # Nothing that this SM cached before.
    expert = tl.load(ids + slot, choice < K, other=-1, cache_modifier=".cg")
    expert = local_ids(expert, first_expert, n_experts)
    ok = (expert >= 0) & (row < n_rows)
    n = tl.where(ok, expert.to(tl.int64) * n_rows + row, 0)
    slot = tl.where(ok, slot, token * K)
    found = _products(
        down, high, scale, x, xs, xt, n[:, None], slot[:, None], quads, ok[:, None],
        BLOCKS, KIND, SLOTS * BN, BB, INTERPRETED,
    )  # fmt: skip
    if HAS_BIAS:
        found += tl.load(bias + n, ok, other=0.0)
    # What is not ok has read another slot's hidden values, which may be undefined.
    found = tl.where(ok, found * tl.load(weights + slot, ok, other=0.0), 0.0)
    total = tl.sum(tl.reshape(found, [SLOTS, BN]), 0)
    row = first + tl.arange(0, BN)
    _store_sums(total, row, token, residual, shared, gate, out, n_rows, HAS_RESIDUAL, HAS_SHARED)


@triton.jit(do_not_specialize=["quads", "first_expert", "n_experts"])
def _long_sum(
    down, high, scale, x, xs, xt, bias, ids, weights, residual, shared, gate, out, n_rows, quads,
    first_expert, n_experts,
    K: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr,
    BB: tl.constexpr, TURNS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_SHARED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`_sum` for several tokens. A program has TURNS times BN rows: it reads hidden values once for all of them, and
    the next rows' weights while it multiplies some. Tensors are (BN, SLOTS, BB); a row has at most BB blocks.
    """
    let_next_start()
    token, choice = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    expert = tl.load(ids + token * K + choice, choice < K, other=-1, cache_modifier=".cg")  # see `_sum`
    expert = local_ids(expert, first_expert, n_experts)
    is_used, first = expert >= 0, tl.where(expert >= 0, expert, 0).to(tl.int64) * n_rows
    slot = token * K + tl.where(is_used, choice, 0)
    b = quads * 4 + tl.arange(0, BB)[None, None, :]  # see `row_products`
    inside, vector = b < BLOCKS, slot[None, :, None]
    there = inside & is_used[None, :, None]
    start = tl.program_id(1) * (TURNS * BN)
    row = start + tl.arange(0, BN)
    n = first[None, :] + tl.minimum(row, n_rows - 1)[:, None]
    words, w, h0, h1 = load_blocks(down, high, scale, n[:, :, None], b, there, BLOCKS, KIND)
    wait()
    v, s, t = load_vector(
        x + vector * (BLOCKS * 8), xs + vector * BLOCKS, xt + vector * BLOCKS, b, inside, BLOCKS, KIND
    )
    share = tl.load(weights + slot)[None, :]
    zero = tl.zeros([BN, SLOTS, BB], tl.int32)
    for turn in tl.static_range(TURNS):
        row, n_now, now = start + turn * BN + tl.arange(0, BN), n, (words, w, h0, h1)
        if turn + 1 < TURNS:
            n = first[None, :] + tl.minimum(row + BN, n_rows - 1)[:, None]
            words, w, h0, h1 = load_blocks(down, high, scale, n[:, :, None], b, there, BLOCKS, KIND)
        found = tl.sum(block_products(now[0], now[1], now[2], now[3], v, s, t, zero, KIND, INTERPRETED), 2)
        if HAS_BIAS:
            found += tl.load(bias + n_now)
        total = tl.sum(tl.where(is_used[None, :], found * share, 0.0), 1)
        _store_sums(total, row, token, residual, shared, gate, out, n_rows, HAS_RESIDUAL, HAS_SHARED)


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


def _n_blocks(n_columns: int) -> int:
    """Blocks of a row per iteration: those of the shortest rows at once, of others as many as leave few unused."""
    n: int = max(4, triton.next_power_of_2(n_columns // BLOCK))
    if n <= 32:
        return n
    return 64 if n_columns // BLOCK % 64 == 0 else 32


def expert_hidden(
    gate: WeightPlanes,
    up: WeightPlanes,
    n_experts: int,
    gate_x: Rows,
    up_x: Rows,
    ids: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    function: str = "silu",
    form: str = PLAIN,
    first_expert: int = 0,
) -> Rows:
    """hidden (tokens · k, ff) in `form`, undefined where ids (tokens, k) are of no expert here; x in the forms that
    gate and up take.

    `biases`: of gate and up, (experts, ff) float32. `first_expert`: the id of the first one of `n_experts` here.
    """
    n_rows, k = gate.n_rows // max(n_experts, 1), ids.shape[1]
    assert (gate.n_rows, gate.n_columns) == (up.n_rows, up.n_columns)
    assert (gate_x.form, up_x.form) == (operand_form(gate), operand_form(up))
    assert ids.is_contiguous()
    assert ids.dtype == torch.int32
    hidden = Rows.empty(form, ids.numel(), n_rows, ids.device)
    _hidden[(ids.numel(), triton.cdiv(n_rows, _ROWS))](
        *_planes(gate), *_planes(up), *_operand(gate_x), *_operand(up_x),
        *(biases or (hidden.scale, hidden.scale)), ids, hidden.bytes_or_values, hidden.scale, hidden.total, n_rows, 0,
        first_expert, n_experts,
        K=k, BLOCKS=gate.n_columns // BLOCK, GATE_KIND=_kind(gate), UP_KIND=_kind(up), BN=_ROWS,
        BB=_n_blocks(gate.n_columns), OUT_BLOCKS=n_rows // BLOCK, FORM=form, FUNCTION=function,
        HAS_BIAS=biases is not None, INTERPRETED=INTERPRETED, num_warps=4, **overlapping(),
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
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
    first_expert: int = 0,
) -> torch.Tensor:
    """out (tokens, embd) float32 from hidden (tokens · k, ff), in the form that down takes. `bias`: (experts, embd)

    `shared`: a shared expert's result (tokens, embd) and its gate (tokens, 1).
    """
    n_rows, (n_tokens, k) = down.n_rows // max(n_experts, 1), ids.shape
    assert hidden.form == operand_form(down)
    assert weights.is_contiguous()
    slots, blocks = triton.next_power_of_2(k), _n_blocks(down.n_columns)
    out = torch.empty(n_tokens, n_rows, device=ids.device)
    given = (
        *_planes(down), *_operand(hidden), out if bias is None else bias, ids, weights,
        out if residual is None else residual, *(shared or (out, out)), out, n_rows, 0, first_expert, n_experts,
    )  # fmt: skip
    options = {
        "K": k, "SLOTS": slots, "BLOCKS": down.n_columns // BLOCK, "KIND": _kind(down), "BB": blocks,
        "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "HAS_SHARED": shared is not None,
        "INTERPRETED": INTERPRETED, **overlapping(),
    }  # fmt: skip
    rows = max(1, _SUM_TILE // (slots * blocks))
    if n_tokens >= _MANY_TOKENS and down.is_packed and down.n_columns <= blocks * BLOCK:
        grid = n_tokens, triton.cdiv(n_rows, rows * _TURNS)
        _long_sum[grid](*given, BN=rows, TURNS=_TURNS, num_warps=4, **options)
    else:
        _sum[(n_tokens, triton.cdiv(n_rows, rows))](*given, BN=rows, num_warps=4, **options)
    return out
