"""The choice of experts: one program for each token.

    route           ids of the best `n_used` experts by score (+ bias), best first, the lower id among equals; then -1
    route_weights   softmax or sigmoid scores of the chosen, divided by their sum if `normalizes`, · scale

A NaN counts as the best score, so that the weights show it. Reference: graph.ops.Route, graph.ops.RouteWeights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.graph.ops import SIGMOID, Route, RouteWeights


@triton.jit
def _route(
    logits, n_used, bias, ids, n_experts,
    K: tl.constexpr, N: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    token, e = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    inside = e < n_experts
    scores = tl.load(logits + token * n_experts + e, inside, other=float("-inf"))
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    if HAS_BIAS:
        scores += tl.load(bias + e, inside, other=0.0)
    scores = tl.where(scores == scores, scores, float("inf"))
    scores = tl.where(inside, scores, float("-inf"))
    count = tl.load(n_used + token)
    for i in range(K):
        best, expert = tl.max(scores, 0), tl.argmax(scores, 0)
        is_used = (i < count) & (best > float("-inf"))
        tl.store(ids + token * K + i, tl.where(is_used, expert, -1).to(tl.int32))
        scores = tl.where(e == expert, float("-inf"), scores)


@triton.jit
def _route_weights(
    logits, ids, out, n_experts, scale,
    K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, IS_SIGMOID: tl.constexpr, NORMALIZES: tl.constexpr,
):  # fmt: skip
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, M)
    expert = tl.load(ids + token * K + i, i < K, other=-1)
    is_chosen = expert >= 0
    own = tl.load(logits + token * n_experts + expert, is_chosen, other=float("-inf"))
    if IS_SIGMOID:
        weight = tl.where(is_chosen, 1.0 / (1.0 + tl.exp(-own)), 0.0)
        if NORMALIZES:
            weight = weight / (tl.sum(weight, 0) + 1e-20)
    elif NORMALIZES:
        largest = tl.max(own, 0)
        weight = tl.where(is_chosen, tl.exp(own - tl.where(largest == float("-inf"), 0.0, largest)), 0.0)
        total = tl.sum(weight, 0)
        weight = weight / tl.where(total == 0.0, 1.0, total)
    else:
        e = tl.arange(0, N)
        row = tl.load(logits + token * n_experts + e, e < n_experts, other=float("-inf"))
        largest = tl.max(row, 0)
        weight = tl.where(is_chosen, tl.exp(own - largest), 0.0) / tl.sum(tl.exp(row - largest), 0)
    tl.store(out + token * K + i, weight * scale, i < K)


def _warps(n_experts: int) -> int:
    return max(1, min(8, n_experts // 128))


def route(op: Route, logits: torch.Tensor, n_used: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """ids (tokens, k) int32 from logits (tokens, experts) float32; all expert groups must be allowed."""
    assert op.n_groups_used == op.n_groups
    assert logits.is_contiguous()
    n_tokens, n_experts = logits.shape
    ids = torch.empty(n_tokens, op.k, dtype=torch.int32, device=logits.device)
    _route[(n_tokens,)](
        logits, n_used, logits if bias is None else bias, ids, n_experts,
        K=op.k, N=triton.next_power_of_2(n_experts), IS_SIGMOID=op.score == SIGMOID, HAS_BIAS=bias is not None,
        num_warps=_warps(n_experts),
    )  # fmt: skip
    return ids


def route_weights(op: RouteWeights, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The chosen experts' weights (tokens, k) float32."""
    assert logits.is_contiguous()
    (n_tokens, n_experts), k = logits.shape, ids.shape[1]
    out = torch.empty(n_tokens, k, device=logits.device)
    _route_weights[(n_tokens,)](
        logits, ids, out, n_experts, op.scale,
        K=k, N=triton.next_power_of_2(n_experts), M=triton.next_power_of_2(k), IS_SIGMOID=op.score == SIGMOID,
        NORMALIZES=op.normalizes, num_warps=1 if op.normalizes else _warps(n_experts),
    )  # fmt: skip
    return out
