"""Steps of native programs for mixtures of experts (csrc/expert_ffn.hpp)."""

from __future__ import annotations

from typing import Any

from motley.backends.cpu.addresses import Memory
from motley.backends.cpu.memory import reads_values
from motley.backends.cpu.native import FORMATS, FUNCTIONS, PLAIN_FORMATS, address
from motley.backends.cpu.weights import RepackedTensor
from motley.graph import Tensor
from motley.graph.ops import SIGMOID, ExpertFfn, Route, RouteWeights
from motley.plan import Single


def add_route(program: Any, memory: Memory, node: Tensor) -> None:
    op, (logits, n_used, *bias) = node.op, node.inputs
    assert isinstance(op, Route)
    at = memory.address
    n_tokens, n_experts = logits.shape
    program.route(
        at(logits),
        at(n_used),
        at(bias[0]) if bias else 0,
        at(node),
        n_tokens,
        n_experts,
        op.k,
        op.n_groups,
        op.n_groups_used,
        op.score == SIGMOID,
    )


def add_route_weights(program: Any, memory: Memory, node: Tensor) -> None:
    op, (logits, ids) = node.op, node.inputs
    assert isinstance(op, RouteWeights)
    at = memory.address
    sizes = (*logits.shape, ids.shape[1])
    program.route_weights(at(logits), at(ids), at(node), *sizes, op.score == SIGMOID, op.normalizes, op.scale)


def add_expert_ffn(program: Any, memory: Memory, stage: Single, *, codes: int, is_exact: bool) -> None:
    """`codes`: the address of the input's quantized rows, 0 where it takes none."""
    node = stage.node
    assert isinstance(node.op, ExpertFfn)
    x, ids, weights, *matrices = node.inputs[:6]
    biases: list[Tensor | None] = [*node.inputs[6:]] or [None] * 3
    at = memory.address
    parts = []
    for matrix, bias in zip(matrices, biases, strict=True):
        packed = memory.weights[matrix.name]
        assert isinstance(packed, RepackedTensor)
        has_bias = bias is not None and bias.n_values > 0  # the down bias is on one device only
        form = FORMATS[packed.format.name]
        where = at(bias) if has_bias else 0
        parts.append((address(packed.data), form, matrix.shape[1], where, packed.expert_bytes))
    program.expert_ffn(
        at(x),
        codes,
        *x.shape,
        at(ids),
        at(weights),
        ids.shape[1],
        matrices[0].shape[0],
        parts,
        FUNCTIONS[node.op.function],
        0,
        at(node),
        memory.room(node),
        reads_values(stage, is_exact),
        not is_exact and matrices[2].dtype not in PLAIN_FORMATS,
        is_exact,
    )
