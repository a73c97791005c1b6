"""Inputs to try split rules on: ops' own samples, and shapes that those leave out."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from split_values import CacheValue, spell

from motley.formats import FORMATS, PackedTensor
from motley.graph import Sample
from motley.graph.ops import (
    OPS,
    Add,
    Attention,
    BatchMatMul,
    CacheStore,
    Concat,
    ExpertFfn,
    GetRows,
    LocalIds,
    MatMul,
    Mul,
    Permute,
    Reshape,
    Rope,
    Route,
    RouteWeights,
    SetRows,
    Slice,
    Softmax,
)
from motley.graph.tensor import draw, draw_ids


def sampled(name: str, seed: int) -> list[Sample]:
    """The op's own samples (a few of them where there is one for each format) and those below."""
    rng, cls = random.Random(seed), OPS[name]
    own = list(cls.__new__(cls).samples(rng))  # `samples` uses no attribute of its instance
    return [*rng.sample(own, min(len(own), 4)), *_more_samples(name, rng)]


def _more_samples(name: str, rng: random.Random) -> Iterator[Sample]:
    """Shapes that ops' own samples leave out, small enough that cuts of any axis meet each other."""
    tokens, heads, group, dim = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3), 4
    x = draw(rng, tokens, heads * group, dim)
    kv = CacheValue.random(rng, tokens, heads, dim)
    ids = draw_ids(rng, 4, 6)
    match name:
        case "add" | "mul":
            op = Add() if name == "add" else Mul()
            yield Sample(op, (x, draw(rng, heads * group, dim)))
            yield Sample(op, (x, draw(rng, tokens, 1, dim)))
            yield Sample(op, (x, draw(rng, 1)))
        case "softmax":
            yield Sample(Softmax(), (x,))
        case "matmul":
            yield Sample(MatMul(), (x, draw(rng, 5, dim)))
            yield Sample(MatMul(), (draw(rng, 6), draw(rng, 3, 6)))
            yield Sample(MatMul(), (draw(rng, 3, 96), PackedTensor.pack(draw(rng, 4, 96), FORMATS["Q4_0"])))
        case "batch_matmul":
            yield Sample(BatchMatMul(), (draw(rng, 4, 3), draw(rng, 3, 5)))
            yield Sample(BatchMatMul(), (draw(rng, 2, 3, 2, 4), draw(rng, 2, 3, 4, 3)))
        case "rope":
            positions = draw_ids(rng, tokens, 50)
            yield Sample(Rope(4), (x, positions))
        case "cache_store":
            yield Sample(CacheStore(), (kv, draw(rng, tokens, heads, dim), draw(rng, tokens, heads, dim)))
        case "attention":
            yield Sample(Attention(0.5), (x, kv))
            yield Sample(Attention(0.5, window=2), (x, kv))
        case "reshape":
            yield Sample(Reshape((tokens, heads * group * dim)), (x,))
            yield Sample(Reshape((tokens * heads * group * 2, dim // 2)), (x,))
            yield Sample(Reshape((tokens, heads, group, dim)), (x,))
            yield Sample(Reshape((6, 4)), (draw(rng, 2, 12),))
            yield Sample(Reshape((24,)), (draw(rng, 2, 3, 4),))
            yield Sample(Reshape((1, 4, 1)), (draw(rng, 4),))
            yield Sample(Reshape((0, 2, 2)), (draw(rng, 0, 4),))
        case "permute":
            yield Sample(Permute((1, 0)), (draw(rng, 3, 4),))
        case "slice":
            yield Sample(Slice(0, 1, 4), (draw(rng, 5, 2),))
            yield Sample(Slice(2, 1, 3), (x,))
        case "concat":
            yield Sample(Concat(0), (draw(rng, 2, 3), draw(rng, 4, 3)))
            yield Sample(Concat(1), (draw(rng, 2, 4), draw(rng, 2, 4)))
            yield Sample(Concat(0), (draw(rng, 5),))
        case "get_rows":
            yield Sample(GetRows(), (draw(rng, 6, 2, 3), ids))
            yield Sample(GetRows(), (PackedTensor.pack(draw(rng, 6, 96), FORMATS["Q8_0"]), ids))
            yield Sample(GetRows(), (draw(rng, 6, 2), torch.tensor([2, -1, 5], dtype=torch.int32)))
        case "set_rows":
            yield Sample(SetRows(), (draw(rng, 6, 2), ids, draw(rng, 4, 2)))
            yield Sample(SetRows(), (draw(rng, 3, 2), torch.tensor([-1, 2, 2]).int(), draw(rng, 3, 2)))
        case "local_ids":
            yield Sample(LocalIds(spell([0, 1, 1, 0, 2, 1]), 1), (ids.reshape(2, 2),))
        case "route":
            yield Sample(Route(3), (draw(rng, 5, 6), torch.tensor([3, 0, 1, 2, 3]).int()))
            used = torch.tensor([2, 1]).int()
            yield Sample(Route(2, "sigmoid", 3, 2), (draw(rng, 2, 6), used, draw(rng, 6)))
        case "route_weights":
            choices = torch.tensor([[0, 3], [-1, 2], [-1, -1]]).int()
            yield Sample(RouteWeights(), (draw(rng, 3, 4), choices))
            yield Sample(RouteWeights("sigmoid", normalizes=True, scale=2.0), (draw(rng, 3, 4), choices))
        case "expert_ffn":
            choices = torch.tensor([[0, 3], [-1, 2]]).int()
            chosen = (draw(rng, 2, 64), choices, draw(rng, 2, 2))
            sizes = ((4, 96, 64), (4, 96, 64), (4, 64, 96))
            packed = [PackedTensor.pack(draw(rng, *size) / 8, FORMATS["Q8_0"]) for size in sizes]
            yield Sample(ExpertFfn(), (*chosen, *packed))
            biases = [draw(rng, 4, n) for n in (96, 96, 64)]
            yield Sample(ExpertFfn("clamped_swiglu"), (*chosen, *packed, *biases))
