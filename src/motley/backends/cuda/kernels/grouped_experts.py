"""The FFN of chosen experts for many tokens, on the tensor cores: slots (token, choice) are sorted by expert.

    groups           slots in the order of their experts, cut into blocks of BM slots of one expert
    grouped_hidden   for each slot with expert e:  hidden = function(gate[e] · x, up[e] · x)
    grouped_down     for each slot:                weight · (down[e] · hidden)
    slot_sums        for each token:               the sum over its slots, in their order, + residual

A program multiplies one block of slots with a tile of its expert's rows, so an expert's weights are read once for each
BM slots that use it, not once for each token. No shape depends on the routing: there are as many blocks as any routing
could need, and those that this one does not need return at once. Slots whose id is -1 are in no block.
Reference: graph.ops.ExpertFfn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import INTERPRETED, both_halves
from motley.backends.cuda.kernels.experts import gate_values, local_ids
from motley.backends.cuda.kernels.matmul import (
    has_totals,
    n_steps,
    nibble_tiles,
    tile_products,
    tile_step,
    tile_values,
)
from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.pipeline import launch
from motley.backends.cuda.kernels.rows import HALVES, Rows
from motley.backends.cuda.planes import BLOCK, WeightPlanes

MIN_TOKENS = 9  # with fewer, most experts have one token, and `experts` reads them as fast
_CHUNK = 1024  # slots that are sorted at a time


@dataclass(frozen=True)
class Tile:
    """Rows and words of each row in a tile of weights, warps, pipeline stages, tiles of a program."""

    rows: int
    blocks: int
    warps: int
    stages: int
    count: int = 1  # of downs only


def hidden_tile(size: int) -> Tile:
    """The tile for blocks of `size` slots. Measured on an H200."""
    return Tile(32, 32, 2, 3) if size < 64 else Tile(128, 32, 4, 2)


def down_tile(size: int) -> Tile:
    if size < 16:
        return Tile(64, 32, 4, 3, count=4)
    return Tile(128, 16, 4, 3) if size < 64 else Tile(128, 32, 4, 2)


@dataclass(frozen=True, eq=False)
class Groups:
    """Blocks of slots. All int32, on the device."""

    order: torch.Tensor  # (slots,): slots by expert; what comes after those with an expert is undefined
    experts: torch.Tensor  # (blocks,): of each block; -1: the block is not needed
    starts: torch.Tensor  # (blocks,): its first place in `order`
    stops: torch.Tensor  # (blocks,): the end of its expert's slots in `order`
    size: int  # slots of a block

    @property
    def n_blocks(self) -> int:
        return self.experts.shape[0]


def block_size(n_slots: int, n_experts: int) -> int:
    """Slots of a block: large ones if experts have many slots each. Only few sizes, as each is a compiled variant.

    A tensor core multiplies eight at least. Of random choices, one expert in sixty has more than twice the mean.
    """
    if n_slots <= 4 * n_experts:
        return 8
    return 16 if n_slots <= 16 * n_experts else 64


@triton.jit(do_not_specialize=["n_slots", "n_blocks", "first_expert"])
def _group(
    ids, order, experts, starts, stops, n_slots, n_blocks, first_expert,
    EXPERTS: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program sorts the slots of one expert. Each of them counts all experts' slots, to know its own first place."""
    let_next_start()
    wait()
    expert, bins, i = tl.program_id(0), tl.arange(0, N), tl.arange(0, CHUNK)
    counts = tl.zeros([N], tl.int32)
    for first in range(0, n_slots, CHUNK):
        x = local_ids(tl.load(ids + first + i, first + i < n_slots, other=-1), first_expert, EXPERTS)
        counts += tl.histogram(tl.maximum(x, 0), N, mask=x >= 0)
    n_own = tl.sum(tl.where(bins == expert, counts, 0), 0)
    start = tl.sum(tl.where(bins < expert, counts, 0), 0)
    block = tl.sum(tl.where(bins < expert, (counts + SIZE - 1) // SIZE, 0), 0)
    place = start
    for first in range(0, n_slots, CHUNK):
        x = local_ids(tl.load(ids + first + i, first + i < n_slots, other=-1), first_expert, EXPERTS)
        is_own = (x == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, 0) - 1, first + i, is_own > 0)
        place += tl.sum(is_own, 0)
    for done in range(0, n_own, SIZE):
        tl.store(experts + block, expert)
        tl.store(starts + block, start + done)
        tl.store(stops + block, start + n_own)
        block += 1
    if expert == EXPERTS - 1:
        for first in range(block, n_blocks, CHUNK):
            tl.store(experts + first + i, tl.full([CHUNK], -1, tl.int32), first + i < n_blocks)


def groups(ids: torch.Tensor, n_experts: int, size: int | None = None, first_expert: int = 0) -> Groups:
    """The blocks for ids (tokens, k), without a copy to the host. `first_expert`: the id of the first one here."""
    n_slots = ids.numel()
    assert ids.is_contiguous()
    assert ids.dtype == torch.int32
    size = size or block_size(n_slots, n_experts)
    # Each expert with slots may leave one block that is not full.
    n_blocks = n_slots // size + min(n_experts, n_slots)
    order = torch.empty(n_slots, dtype=torch.int32, device=ids.device)
    experts, starts, stops = (torch.empty(n_blocks, dtype=torch.int32, device=ids.device) for _ in range(3))
    _group[(n_experts,)](
        ids, order, experts, starts, stops, n_slots, n_blocks, first_expert,
        EXPERTS=n_experts, N=triton.next_power_of_2(n_experts), SIZE=size, CHUNK=_CHUNK, num_warps=4, **overlapping(),
    )  # fmt: skip
    return Groups(order, experts, starts, stops, size)


@triton.jit
def _pair_products(
    gate, gate_high, gate_scale, up, up_high, up_scale, x, x_total, n, m, is_slot, g, u,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BB: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """`matmul.tile_products` of gates and of ups of one kind: x is read once for both."""
    WORDS: tl.constexpr = 8 if KIND == "Q8_0" else 4
    for step in range((BLOCKS + BB - 1) // BB * WORDS):
        j, b = step % WORDS, step // WORDS * BB + tl.arange(0, BB)
        inside = b < BLOCKS
        given = inside[:, None] & is_slot
        at, block = (n * WORDS + j) * BLOCKS + b[None, :], n * BLOCKS + b[None, :]
        g_word, u_word = (
            tl.load(gate + at, inside[None, :], other=0),
            tl.load(up + at, inside[None, :], other=0),
        )
        g0 = tl.load(gate_scale + block, inside[None, :], other=0)
        u0 = tl.load(up_scale + block, inside[None, :], other=0)
        if gate_scale.dtype.element_ty == tl.float16:
            g1, u1 = g0, u0
        else:
            g0, g1 = both_halves(g0, PLAIN)
            u0, u1 = both_halves(u0, PLAIN)
        x_at = x + m * 32 * BLOCKS + 4 * j * BLOCKS + b[:, None]  # (BB, BM)
        if has_totals(KIND):
            PART: tl.constexpr = (
                -0.25 if KIND == "Q4_K" else -2.0
            )  # a quarter of it with each of the four words
            total = tl.load(x_total + m * BLOCKS + b[:, None], given, other=0.0)
            g, u = tl.dot(g1 * PART, total, g), tl.dot(u1 * PART, total, u)
            g_small, u_small = g0 * 0.0625, u0 * 0.0625
            for i in tl.static_range(4):
                g_low, g_high = nibble_tiles(g_word, g0, g_small, i, PLAIN)
                u_low, u_high = nibble_tiles(u_word, u0, u_small, i, PLAIN)
                low = tl.load(x_at + i * BLOCKS, given, other=0.0)
                high = tl.load(x_at + (16 + i) * BLOCKS, given, other=0.0)
                g, u = tl.dot(g_low, low, g), tl.dot(u_low, low, u)
                g, u = tl.dot(g_high, high, g), tl.dot(u_high, high, u)
        else:
            gh0, gh1, uh0, uh1 = g_word, g_word, u_word, u_word
            if KIND == "Q6_K":
                more = n * 2 * BLOCKS + b[None, :]
                gh0 = tl.load(gate_high + more, inside[None, :], other=0)
                gh1 = tl.load(gate_high + more + BLOCKS, inside[None, :], other=0)
                uh0 = tl.load(up_high + more, inside[None, :], other=0)
                uh1 = tl.load(up_high + more + BLOCKS, inside[None, :], other=0)
            for i in tl.static_range(4):
                low = tl.load(x_at + i * BLOCKS, given, other=0.0)
                g = tl.dot(tile_values(g_word, gh0, g0, g1, j, KIND, i, False, PLAIN), low, g)
                u = tl.dot(tile_values(u_word, uh0, u0, u1, j, KIND, i, False, PLAIN), low, u)
                if WORDS == 4:
                    high = tl.load(x_at + (16 + i) * BLOCKS, given, other=0.0)
                    g = tl.dot(tile_values(g_word, gh1, g0, g1, j, KIND, i, True, PLAIN), high, g)
                    u = tl.dot(tile_values(u_word, uh1, u0, u1, j, KIND, i, True, PLAIN), high, u)
    return g, u


@triton.jit
def _hidden(
    gate, gate_high, gate_scale, up, up_high, up_scale, x, x_scale, x_total, gate_bias, up_bias,
    order, experts, starts, stops, out, n_rows,
    K: tl.constexpr, BLOCKS: tl.constexpr, GATE_KIND: tl.constexpr, UP_KIND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, FUNCTION: tl.constexpr, HAS_BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait()
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
        if GATE_KIND == UP_KIND and BM < 64:  # registers for two sums of large blocks would not suffice
            g, u = _pair_products(
                gate, gate_high, gate_scale, up, up_high, up_scale, x, x_total, n, token, is_slot, zero, zero,
                BLOCKS, GATE_KIND, BB, PLAIN,
            )  # fmt: skip
        else:
            g = tile_products(
                gate, gate_high, gate_scale, x, x_total, n, token, is_slot, zero, 0, n_steps(BLOCKS, GATE_KIND, BB),
                BLOCKS, GATE_KIND, BB, PLAIN,
            )  # fmt: skip
            u = tile_products(
                up, up_high, up_scale, x, x_total, n, token, is_slot, zero, 0, n_steps(BLOCKS, UP_KIND, BB),
                BLOCKS, UP_KIND, BB, PLAIN,
            )  # fmt: skip
        s = tl.load(x_scale + token, is_slot, other=0.0)
        g, u = g * s, u * s
        if HAS_BIAS:
            g += tl.load(gate_bias + n)
            u += tl.load(up_bias + n)
        at = slot * n_rows + row[:, None]
        tl.store(out + at, gate_values(g, u, FUNCTION), is_slot & (row < n_rows)[:, None])


@triton.jit
def _store_slots(acc, factor, weight, bias, out, n, row, slot, is_slot, n_rows, HAS_BIAS: tl.constexpr):
    """Store weight · (factor · acc + bias), acc (BN, BM) of rows and slots."""
    found = acc * factor
    if HAS_BIAS:
        found += tl.load(bias + n)
    tl.store(out + slot * n_rows + row[:, None], found * weight, is_slot & (row < n_rows)[:, None])


@triton.jit
def _down(
    down, high, scale, x, x_scale, x_total, bias, weights, order, experts, starts, stops, out, n_rows,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    TILES: tl.constexpr, HAS_BIAS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """A program has TILES tiles of rows, one after the other: it reads the next one's weights while it ends one."""
    let_next_start()
    wait()
    block = tl.program_id(1)
    expert = tl.load(experts + block)
    if expert >= 0:
        place = tl.load(starts + block) + tl.arange(0, BM)
        is_slot = place < tl.load(stops + block)
        slot = tl.load(order + place, is_slot, other=0)[None, :].to(tl.int64)
        is_slot = is_slot[None, :]
        factor = tl.load(x_scale + slot, is_slot, other=0.0)
        weight = tl.load(weights + slot, is_slot, other=0.0)
        first, acc = expert.to(tl.int64) * n_rows, tl.zeros([BN, BM], tl.float32)
        STEPS: tl.constexpr = n_steps(BLOCKS, KIND, BB)
        if TILES == 1:
            row = tl.program_id(0) * BN + tl.arange(0, BN)
            n = (first + tl.minimum(row, n_rows - 1))[:, None]
            acc = tile_products(
                down, high, scale, x, x_total, n, slot, is_slot, acc, 0, STEPS, BLOCKS, KIND, BB, PLAIN
            )
            _store_slots(acc, factor, weight, bias, out, n, row, slot, is_slot, n_rows, HAS_BIAS)
        else:
            for step in range(TILES * STEPS):
                row = (tl.program_id(0) * TILES + step // STEPS) * BN + tl.arange(0, BN)
                n = (first + tl.minimum(row, n_rows - 1))[:, None]
                acc = tile_step(
                    down, high, scale, x, x_total, n, slot, is_slot, acc, step % STEPS, BLOCKS, KIND, BB, PLAIN
                )  # fmt: skip
                if step % STEPS == STEPS - 1:
                    _store_slots(acc, factor, weight, bias, out, n, row, slot, is_slot, n_rows, HAS_BIAS)
                    acc = tl.zeros([BN, BM], tl.float32)


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
    tile: Tile | None = None,
) -> torch.Tensor:
    """hidden (tokens · k, ff) float32, undefined for slots without an expert. x: (tokens, embd) as HALVES."""
    n_rows = gate.n_rows // n_experts
    assert (gate.n_rows, gate.n_columns) == (up.n_rows, up.n_columns)
    assert (x.form, x.n_columns) == (HALVES, gate.n_columns)
    hidden = torch.empty(x.n_rows * k, n_rows, device=found.order.device)
    tile = tile or hidden_tile(found.size)
    launch(
        _hidden[(triton.cdiv(n_rows, tile.rows), found.n_blocks)],
        *_planes(gate), *_planes(up), x.values, x.scale, x.total, *(biases or (hidden, hidden)),
        found.order, found.experts, found.starts, found.stops, hidden, n_rows,
        K=k, BLOCKS=gate.n_columns // BLOCK, GATE_KIND=gate.kind, UP_KIND=up.kind,
        BM=found.size, BN=tile.rows, BB=tile.blocks, FUNCTION=function, HAS_BIAS=biases is not None,
        PLAIN=INTERPRETED, num_warps=tile.warps, num_stages=tile.stages, **overlapping(),
    )  # fmt: skip
    return hidden


def grouped_down(
    down: WeightPlanes,
    n_experts: int,
    hidden: Rows,
    weights: torch.Tensor,
    found: Groups,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """weight · (down · hidden) (tokens · k, embd) float32, undefined for slots without an expert."""
    n_rows = down.n_rows // n_experts
    assert (hidden.form, hidden.n_columns) == (HALVES, down.n_columns)
    assert weights.is_contiguous()
    out = torch.empty(hidden.n_rows, n_rows, device=found.order.device)
    tile = tile or down_tile(found.size)
    launch(
        _down[(triton.cdiv(n_rows, tile.rows * tile.count), found.n_blocks)],
        *_planes(down), hidden.values, hidden.scale, hidden.total, out if bias is None else bias, weights,
        found.order, found.experts, found.starts, found.stops, out, n_rows,
        BLOCKS=down.n_columns // BLOCK, KIND=down.kind, BM=found.size, BN=tile.rows, BB=tile.blocks,
        TILES=tile.count, HAS_BIAS=bias is not None, PLAIN=INTERPRETED,
        num_warps=tile.warps, num_stages=tile.stages, **overlapping(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first_expert", "n_experts"])
def _slot_sums(
    parts, ids, residual, shared, gate, out, n_columns, first_expert, n_experts,
    K: tl.constexpr, BN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SHARED: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait()
    token, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    inside = c < n_columns
    total = tl.zeros([BN], tl.float32)
    for i in tl.static_range(K):
        is_used = local_ids(tl.load(ids + token * K + i), first_expert, n_experts) >= 0
        total += tl.load(parts + (token * K + i) * n_columns + c, inside & is_used, other=0.0)
    if HAS_RESIDUAL:
        total += tl.load(residual + token * n_columns + c, inside, other=0.0)
    if HAS_SHARED:
        share = 1.0 / (1.0 + tl.exp(-tl.load(gate + token)))
        total += share * tl.load(shared + token * n_columns + c, inside, other=0.0)
    tl.store(out + token * n_columns + c, total, inside)


def slot_sums(
    parts: torch.Tensor,
    ids: torch.Tensor,
    n_experts: int,
    residual: torch.Tensor | None = None,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
    first_expert: int = 0,
) -> torch.Tensor:
    """Sums of parts (tokens · k, columns) over each token's slots with an expert: (tokens, columns).

    Plus a residual, and a shared expert's result times σ of its gate (tokens, 1), where given.
    """
    (n_tokens, k), n_columns = ids.shape, parts.shape[1]
    out = torch.empty(n_tokens, n_columns, device=parts.device)
    size = min(1024, triton.next_power_of_2(n_columns))
    _slot_sums[(n_tokens, triton.cdiv(n_columns, size))](
        parts, ids, out if residual is None else residual, *(shared or (out, out)), out, n_columns,
        first_expert, n_experts,
        K=k, BN=size, HAS_RESIDUAL=residual is not None, HAS_SHARED=shared is not None, num_warps=4,
        **overlapping(),
    )  # fmt: skip
    return out
