"""The op table: one op, one class, in the file of its kind."""

from __future__ import annotations

from motley.graph.ops.attention import Attention, CacheStore
from motley.graph.ops.elementwise import Activation, Add, Mul, Scale, Softmax
from motley.graph.ops.experts import SIGMOID, SOFTMAX, ExpertFfn, Route, RouteWeights
from motley.graph.ops.matmul import BatchMatMul, MatMul
from motley.graph.ops.norm import RmsNorm
from motley.graph.ops.recurrent import CONVOLUTION, DELTA, CausalConv, DeltaNet, StateInput, state_of
from motley.graph.ops.rope import HALVES, INTERLEAVED, Rope, Yarn
from motley.graph.ops.rows import GetRows, LocalIds, SetRows
from motley.graph.ops.sources import CacheInput, Hadamard, Input, Weight, cache_layer
from motley.graph.ops.views import Concat, Permute, Repeat, Reshape, Slice
from motley.graph.tensor import Op

OPS: dict[str, type[Op]] = {
    op.name: op
    for op in (
        *(Input, Weight, Hadamard),
        *(Add, Mul, Scale, Activation, Softmax, RmsNorm),
        *(MatMul, BatchMatMul, Rope, CacheStore, Attention),
        *(Reshape, Permute, Slice, Concat, Repeat, GetRows, SetRows, LocalIds),
        *(Route, RouteWeights, ExpertFfn, CausalConv, DeltaNet),
    )
}

__all__ = [
    "CONVOLUTION",
    "DELTA",
    "HALVES",
    "INTERLEAVED",
    "OPS",
    "SIGMOID",
    "SOFTMAX",
    "Activation",
    "Add",
    "Attention",
    "BatchMatMul",
    "CacheInput",
    "CacheStore",
    "CausalConv",
    "Concat",
    "DeltaNet",
    "ExpertFfn",
    "GetRows",
    "Hadamard",
    "Input",
    "LocalIds",
    "MatMul",
    "Mul",
    "Permute",
    "Repeat",
    "Reshape",
    "RmsNorm",
    "Rope",
    "Route",
    "RouteWeights",
    "Scale",
    "SetRows",
    "Slice",
    "Softmax",
    "StateInput",
    "Weight",
    "Yarn",
    "cache_layer",
    "state_of",
]
