"""The norm before a router and the router's logits, in one launch, for few tokens:

    normed = x / sqrt(mean(x²) + eps) · norm        logits = normed · routerᵀ (+ bias)

A program computes one logit. The norm is computed again in each of them: it takes less time than another launch. The
first one stores the norm, as float32 and as int8 rows for the experts. x may come as two addends, whose sum is then
stored, too. Reference: graph.ops.RmsNorm, graph.ops.MatMul.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.rows import INT8, Rows, store_rows


@triton.jit
def _norm_and_logits(
    x, added, summed, norm, eps, router, gate, bias, normed, values, scale, total, logits, gates, n_experts,
    BLOCKS: tl.constexpr, BB: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    let_next_start()
    expert, token, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BB)
    k, inside = b[:, None] * 32 + tl.arange(0, 32)[None, :], (b < BLOCKS)[:, None]
    is_expert = expert < n_experts  # the last program has the shared expert's gate
    here = inside & is_expert
    w = tl.load(router + expert.to(tl.int64) * (BLOCKS * 32) + k, here, other=0.0).to(tl.float32)
    if HAS_GATE:
        w += tl.load(gate + k, inside & (expert == n_experts), other=0.0)
    if HAS_NORM:
        factors = tl.load(norm + k, inside, other=0.0)
    wait()
    v = tl.load(x + token * (BLOCKS * 32) + k, inside, other=0.0)
    if ADDS:
        v += tl.load(added + token * (BLOCKS * 32) + k, inside, other=0.0)
        tl.store(summed + token * (BLOCKS * 32) + k, v, inside & (expert == 0))
    if HAS_NORM:
        mean = tl.sum(tl.sum(v * v, 1), 0) / (BLOCKS * 32)
        v = v * tl.rsqrt(mean + eps) * factors
    logit = tl.sum(tl.sum(v * w, 1), 0)
    if HAS_BIAS:
        logit += tl.load(bias + expert, is_expert, other=0.0)
    tl.store(logits + token * n_experts + expert, logit, is_expert)
    if HAS_GATE:
        tl.store(gates + token, logit, expert == n_experts)
    if expert == 0:
        store_rows(v, values, scale, total, token, b, BLOCKS, "int8")
        if HAS_NORM:
            tl.store(normed + token * (BLOCKS * 32) + k, v, inside)


def norm_and_logits(
    x: torch.Tensor,
    router: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    added: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Rows, torch.Tensor]:
    """logits (tokens, experts), the norm of x (tokens, columns) as float32 and as int8 rows, its product with the gate.

    router: (experts, columns), any plain type; norm and gate (columns,), bias (experts,) float32. Without norm: of x.
    `added`: what is added to x before, and where the sum is stored; with a norm only.
    """
    assert added is None or norm is not None, "the result would be x itself"
    (n_tokens, n_columns), n_experts = x.shape, router.shape[0]
    assert x.is_contiguous()
    assert router.is_contiguous()
    assert router.shape[1] == n_columns
    n_blocks = n_columns // 32
    blocks = triton.next_power_of_2(n_blocks)
    normed = x if norm is None else torch.empty_like(x)
    rows = Rows.empty(INT8, n_tokens, n_columns, x.device)
    logits = torch.empty(n_tokens, n_experts, device=x.device)
    gates = torch.empty(n_tokens, 1, device=x.device)
    _norm_and_logits[(n_experts + (gate is not None), n_tokens)](
        x, *(added or (x, x)), x if norm is None else norm, eps,
        router, x if gate is None else gate, x if bias is None else bias, normed,
        rows.bytes_or_values, rows.scale, rows.total, logits, gates, n_experts,
        BLOCKS=n_blocks, BB=blocks, HAS_NORM=norm is not None, HAS_BIAS=bias is not None, HAS_GATE=gate is not None,
        ADDS=added is not None, num_warps=max(1, min(8, blocks // 16)), **overlapping(),
    )  # fmt: skip
    return logits, normed, rows, gates
