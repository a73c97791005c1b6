"""`matmul` for nibbles on Hopper: while the tensor cores multiply one tile of weights, the next is unpacked.

The same product, planes and order of values as in `matmul`; written in Gluon, Triton's language with explicit layouts,
because Triton waits for each warp-group product before it makes the next operand in registers. A step is one word of
codes for BB blocks: eight tiles (BN rows, BB blocks), each multiplied by the activations' same value of all blocks.
Codes, scales and activations come through shared memory, two steps ahead. Buffers are separate allocations, for the
compiler puts a barrier between a copy to one part of an allocation and a read of another.

Gluon may change with every version of Triton: `is_possible` names those that were tried. Reference: as for `matmul`.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.runtime import driver

from motley.backends.cuda.kernels.bits import INTERPRETED, SPLIT_PAIRS, pick_nibbles
from motley.backends.cuda.kernels.rows import Rows
from motley.backends.cuda.planes import BLOCK, WeightPlanes

_TRIED = ("3.6.",)  # versions of Triton
_HOPPER = 90  # the only capability with these products
_MULTIPROCESSORS = 132  # of an H200; fewer programs share their columns out
_BLOCKS = 32  # of a tile


def is_possible(weight: WeightPlanes) -> bool:
    """Whether this kernel can multiply by that matrix here. Its rows begin at multiples of 16 bytes in all planes."""
    if weight.kind not in ("Q4_K", "Q4_0") or weight.n_columns % (8 * BLOCK):
        return False
    if INTERPRETED or not triton.__version__.startswith(_TRIED):
        return False
    return bool(driver.active.get_current_target().arch == _HOPPER)


@gluon.jit
def _nibbles(word, i: gl.constexpr):
    """`bits.nibbles_as_halves`, over 1024."""
    return gl.inline_asm_elementwise(
        pick_nibbles(i, 0x6400), "=r,=r,r,r", [word], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def _scale_and_minimum(scale):
    """Scale and minimum of Q4_K, or of Q4_0, whose scale is a float16."""
    if scale.dtype == gl.float16:
        return scale, scale * 8.0
    else:  # `bits.both_halves`
        return gl.inline_asm_elementwise(
            SPLIT_PAIRS, "=&r,=r,r,r", [scale], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )


@gluon.jit
def _instruction(text: gl.constexpr):
    """An instruction with one result, at this place; nothing is known about the result."""
    return gl.inline_asm_elementwise(text, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _copy_step(
    words_at, scale_at, x_at, total_at, is_value, is_token, words, x, scale, total, g, last, j: gl.constexpr,
    BLOCKS: gl.constexpr, BB: gl.constexpr,
):  # fmt: skip
    """Begin the copies for word j of the blocks of group g; nothing is read from group `last` on."""
    there = g < last
    skip = g.to(gl.int64) * BB
    words_there, x_there, total_there, scale_there = there, is_value & there, is_token & there, there
    if BLOCKS % BB:
        inside = g * BB + gl.arange(0, BB, gl.SliceLayout(0, words_at.type.layout)) < BLOCKS
        words_there = inside[None, :] & there
        inside = g * BB + gl.arange(0, BB, gl.SliceLayout(0, scale_at.type.layout)) < BLOCKS
        scale_there = inside[None, :] & there
        inside = g * BB + gl.arange(0, BB, gl.SliceLayout(0, x_at.type.layout)) < BLOCKS
        x_there, total_there = inside[None, :] & x_there, inside[None, :] & total_there
    async_copy.async_copy_global_to_shared(words, words_at + skip + j * BLOCKS, words_there)
    async_copy.async_copy_global_to_shared(x, x_at + skip + 4 * j * BLOCKS, x_there)
    if j == 0:
        async_copy.async_copy_global_to_shared(scale, scale_at + skip, scale_there)
        async_copy.async_copy_global_to_shared(total, total_at + skip, total_there)
    async_copy.commit_group()


@gluon.jit
def _rows_at(
    plane, row0, n_rows, LENGTH: gl.constexpr, BN: gl.constexpr, BB: gl.constexpr, LAYOUT: gl.constexpr
):
    """Addresses (BN, BB) of the first blocks of rows `row0` …, `LENGTH` words or scales long; of the last row's again
    after the last.
    """
    n = gl.minimum(row0 + gl.arange(0, BN, gl.SliceLayout(1, LAYOUT)), n_rows - 1)[:, None].to(gl.int64)
    return plane + n * LENGTH + gl.arange(0, BB, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _store_sums(
    acc, x_scale, residual, out, row0, token0, n_rows, n_tokens, split,
    SPLITS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Store acc (rows, tokens), times the tokens' scales, plus the residual."""
    row = row0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))[:, None]
    token = token0 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))[None, :]
    ok = (token < n_tokens) & (row < n_rows)
    at = token.to(gl.int64) * n_rows + row
    acc = acc * gl.load(x_scale + token, token < n_tokens, other=0.0)
    if HAS_RESIDUAL:
        acc += gl.load(residual + at, ok & (split == 0), other=0.0)
    if SPLITS == 1:
        gl.store(out + at, acc, ok)
    else:  # as in `matmul`
        gl.atomic_add(out + at, acc, ok, sem="relaxed")


@gluon.jit(do_not_specialize=["n_tokens"])
def _warpgroup_matmul(
    codes, scale, x, x_scale, x_total, residual, out, n_rows, n_tokens,
    BLOCKS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BB: gl.constexpr, SPLITS: gl.constexpr,
    AT_ONCE: gl.constexpr, HAS_RESIDUAL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    _instruction("griddepcontrol.launch_dependents; // $0")
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    IN_WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BB, BB // 4], [WARPS, 1], [1, 0])
    IN_HALVES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BB, BB // 8], [WARPS, 1], [1, 0])
    IS_PAIR: gl.constexpr = scale.dtype.element_ty == gl.int32  # Q4_K; otherwise Q4_0
    IN_SCALES: gl.constexpr = IN_WORDS if IS_PAIR else IN_HALVES
    SHARED_WORDS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    SHARED_HALVES: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    SHARED_SCALES: gl.constexpr = SHARED_WORDS if IS_PAIR else SHARED_HALVES
    SHARED_X: gl.constexpr = gl.NVMMASharedLayout(2 * BB, 16)
    words, xs = (), ()
    for _ in gl.static_range(4):
        words = words + (gl.allocate_shared_memory(gl.int32, [BN, BB], SHARED_WORDS),)  # type: ignore[assignment]
        xs = xs + (gl.allocate_shared_memory(gl.float16, [1, 8 * BM, BB], SHARED_X),)  # type: ignore[assignment]
    scales = gl.allocate_shared_memory(scale.dtype.element_ty, [BN, BB], SHARED_SCALES)
    totals = gl.allocate_shared_memory(gl.float16, [BM, BB], SHARED_X)

    row0, token0, split = gl.program_id(0) * BN, gl.program_id(1) * BM, gl.program_id(2)
    words_at = _rows_at(codes, row0, n_rows, 4 * BLOCKS, BN, BB, IN_WORDS)
    scale_at = _rows_at(scale, row0, n_rows, BLOCKS, BN, BB, IN_SCALES)
    line = gl.arange(0, 8 * BM, gl.SliceLayout(1, IN_HALVES))[:, None]  # low and upper value of each byte
    part, token, b = line // BM, token0 + line % BM, gl.arange(0, BB, gl.SliceLayout(0, IN_HALVES))[None, :]
    x_at = x + token * (32 * BLOCKS) + (part // 2 + part % 2 * 16) * BLOCKS + b
    is_value = token < n_tokens  # padding is not read
    token = token0 + gl.arange(0, BM, gl.SliceLayout(1, IN_HALVES))[:, None]
    total_at, is_token = x_total + token * BLOCKS + b, token < n_tokens

    GROUPS: gl.constexpr = (BLOCKS + BB - 1) // BB
    SHARE: gl.constexpr = (GROUPS + SPLITS - 1) // SPLITS
    first = split * SHARE
    last = gl.minimum(first + SHARE, GROUPS)
    acc = gl.zeros([BN, BM], gl.float32, SUMS)
    _instruction("griddepcontrol.wait; // $0")
    for ahead in gl.static_range(2):
        _copy_step(
            words_at, scale_at, x_at, total_at, is_value, is_token, words[ahead], xs[ahead].index(0), scales, totals,
            first, last, ahead, BLOCKS, BB,
        )  # fmt: skip
    for g in range(first, last):
        for j in gl.static_range(4):
            # Addresses of operands are not loop invariants for the compiler, which would keep them all in registers.
            zero = _instruction("mov.u32 $0, 0;")
            async_copy.wait_group(1)
            gl.thread_barrier()
            _copy_step(
                words_at, scale_at, x_at, total_at, is_value, is_token,
                words[(j + 2) % 4], xs[(j + 2) % 4].index(zero), scales, totals,
                g + (j + 2) // 4, last, (j + 2) % 4, BLOCKS, BB,
            )  # fmt: skip
            if j == 0:  # type: ignore[unreachable]
                w, minimum = _scale_and_minimum(scales.load(OPERAND))
                w_small = w * 0.0625
                w_zero, w_small_zero = w * -1024.0, w_small * -1024.0
                acc = warpgroup_mma(-minimum, totals.permute((1, 0)), acc, is_async=True)
            word = words[j].load(OPERAND)
            for turn in gl.static_range(4 // AT_ONCE):
                low, upper = (), ()
                for i in gl.static_range(turn * AT_ONCE, (turn + 1) * AT_ONCE):
                    a, c = _nibbles(word, i)
                    low = low + (gl.fma(a, w, w_zero),)
                    upper = upper + (gl.fma(c, w_small, w_small_zero),)
                for k in gl.static_range(AT_ONCE):
                    values = xs[j].index(zero).slice(2 * (turn * AT_ONCE + k) * BM, BM)
                    acc = warpgroup_mma(low[k], values.permute((1, 0)), acc, is_async=True)
                    values = xs[j].index(zero).slice((2 * (turn * AT_ONCE + k) + 1) * BM, BM)
                    acc = warpgroup_mma(upper[k], values.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(2 * AT_ONCE, deps=[acc])
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)

    _store_sums(acc, x_scale, residual, out, row0, token0, n_rows, n_tokens, split, SPLITS, HAS_RESIDUAL)


def warpgroup_matmul(
    weight: WeightPlanes, x: Rows, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """The same as `matmul`, which has checked the arguments. Shapes of tiles were measured on an H200."""
    n_tokens, n_rows = x.n_rows, weight.n_rows
    tokens = min(64, max(8, triton.next_power_of_2(n_tokens)))
    is_tall = tokens == 64 and 2 * triton.cdiv(n_rows, 64) > _MULTIPROCESSORS
    rows, warps = (128, 8) if is_tall else (64, 4)
    grid = triton.cdiv(n_rows, rows), triton.cdiv(n_tokens, tokens)
    splits = 2 if grid[0] * grid[1] < _MULTIPROCESSORS else 1
    if splits > 1:
        assert residual is not out, "the residual is read while the sum is made"
        out.zero_()
    _warpgroup_matmul[(*grid, splits)](
        weight.codes, weight.scale, x.values, x.scale, x.total, out if residual is None else residual, out,
        n_rows, n_tokens,
        BLOCKS=weight.n_columns // BLOCK, BM=tokens, BN=rows, BB=_BLOCKS, SPLITS=splits,
        AT_ONCE=2 if tokens == 64 else 4, HAS_RESIDUAL=residual is not None, WARPS=warps, num_warps=warps,
        launch_pdl=True,
    )  # fmt: skip
