"""The choice of experts: one program for each token.

    route           ids of the best `n_used` experts by score (+ bias), best first, the lower id among equals; then -1
    route_and_weigh both, in one launch
    route_weights   softmax or sigmoid scores of the chosen, divided by their sum if `normalizes`, · scale

A NaN counts as the best score, so that the weights show it. Reference: graph.ops.Route, graph.ops.RouteWeights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.graph.ops import SIGMOID, Route, RouteWeights


@triton.jit
def _chosen(
    logits, n_used, bias, token, n_experts, K: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The token's experts (M,), best first, then -1."""
    e, i = tl.arange(0, N), tl.arange(0, M)
    inside = e < n_experts
    scores = tl.load(logits + token * n_experts + e, inside, other=float("-inf"))
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    if HAS_BIAS:
        scores += tl.load(bias + e, inside, other=0.0)
    scores = tl.where(scores == scores, scores, float("inf"))
    scores = tl.where(inside, scores, float("-inf"))
    count = tl.load(n_used + token)
    ids = tl.full([M], -1, tl.int32)
    for k in range(K):
        best, expert = tl.max(scores, 0, return_indices=True)
        is_used = (k < count) & (best > float("-inf"))
        ids = tl.where((i == k) & is_used, expert, ids)
        scores = tl.where(e == expert, float("-inf"), scores)
    return ids


@triton.jit
def _weights(
    logits,
    expert,
    token,
    n_experts,
    scale,
    N: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALIZES: tl.constexpr,
):
    """The weights of a token's experts, 0 for -1."""
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
    return weight * scale


@triton.jit
def _route(
    logits, n_used, bias, ids, weights, n_experts, scale,
    K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    WEIGHS: tl.constexpr, WEIGHTS_SIGMOID: tl.constexpr, NORMALIZES: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait()
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, M)
    expert = _chosen(logits, n_used, bias, token, n_experts, K, N, M, IS_SIGMOID, HAS_BIAS)
    tl.store(ids + token * K + i, expert, i < K)
    if WEIGHS:
        weight = _weights(logits, expert, token, n_experts, scale, N, WEIGHTS_SIGMOID, NORMALIZES)
        tl.store(weights + token * K + i, weight, i < K)


@triton.jit
def _route_weights(
    logits, ids, out, n_experts, scale,
    K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, IS_SIGMOID: tl.constexpr, NORMALIZES: tl.constexpr,
):  # fmt: skip
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, M)
    expert = tl.load(ids + token * K + i, i < K, other=-1)
    weight = _weights(logits, expert, token, n_experts, scale, N, IS_SIGMOID, NORMALIZES)
    tl.store(out + token * K + i, weight, i < K)


@triton.jit(do_not_specialize=["start", "stop"])
def _local_ids(ids, out, n_ids, start, stop, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(ids + i, i < n_ids, other=-1)
    tl.store(out + i, tl.where((x >= start) & (x < stop), x - start, -1), i < n_ids)


def local_ids(ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Ids from `start` to `stop` (without it), counted from `start`; -1 for others. Reference: graph.ops.LocalIds."""
    assert ids.is_contiguous()
    out = torch.empty_like(ids)
    _local_ids[(triton.cdiv(ids.numel(), 256),)](ids, out, ids.numel(), start, stop, N=256, num_warps=2)
    return out


def _warps(n_experts: int) -> int:
    return max(1, min(8, n_experts // 128))


def route(op: Route, logits: torch.Tensor, n_used: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """ids (tokens, k) int32 from logits (tokens, experts) float32; all expert groups must be allowed."""
    return _launch(op, None, logits, n_used, bias)[0]


def route_and_weigh(
    op: Route, weigh: RouteWeights, logits: torch.Tensor, n_used: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` and the chosen experts' weights (tokens, k) float32."""
    return _launch(op, weigh, logits, n_used, bias)


def _launch(
    op: Route,
    weigh: RouteWeights | None,
    logits: torch.Tensor,
    n_used: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert op.n_groups_used == op.n_groups
    assert logits.is_contiguous()
    n_tokens, n_experts = logits.shape
    ids = torch.empty(n_tokens, op.k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(n_tokens, op.k, device=logits.device)
    _route[(n_tokens,)](
        logits, n_used, logits if bias is None else bias, ids, weights, n_experts,
        1.0 if weigh is None else weigh.scale,
        K=op.k, N=triton.next_power_of_2(n_experts), M=triton.next_power_of_2(op.k),
        IS_SIGMOID=op.score == SIGMOID, HAS_BIAS=bias is not None, WEIGHS=weigh is not None,
        WEIGHTS_SIGMOID=weigh is not None and weigh.score == SIGMOID,
        NORMALIZES=weigh is not None and weigh.normalizes, num_warps=_warps(n_experts), **overlapping(),
    )  # fmt: skip
    return ids, weights


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
