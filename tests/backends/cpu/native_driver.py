"""Nodes, graphs and caches to run on the native backend and on the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from motley.backends import ReferenceBackend
from motley.backends.cpu import CpuBackend, ExactCpuBackend, is_available
from motley.backends.cpu.native import core
from motley.formats import PackedTensor
from motley.graph import F32, I32, Graph, Op, Tensor
from motley.graph.ops import Input, Weight
from motley.plan import DevicePlan

if not is_available():
    pytest.skip("the native module is not built", allow_module_level=True)

INSTRUCTION_SETS = core.instruction_sets()


def run_op(backend: Any, op: Op, values: Sequence[torch.Tensor | PackedTensor]) -> torch.Tensor:
    """An op's result on a backend; packed values become weights."""
    nodes: list[Tensor] = []
    weights: dict[str, PackedTensor] = {}
    inputs: dict[str, torch.Tensor] = {}
    for i, value in enumerate(values):
        name = f"x{i}"
        if isinstance(value, PackedTensor):
            nodes.append(Weight(value.shape, value.format.name)(name=name))
            weights[name] = backend.load(value)
        else:
            nodes.append(Input(tuple(value.shape), I32 if value.dtype == torch.int32 else F32)(name=name))
            inputs[name] = value
    return run_graph(backend, Graph.of(op(*nodes)), inputs, weights)[0]


def run_graph(
    backend: Any, graph: Graph, inputs: Mapping[str, Any], weights: Mapping[str, PackedTensor]
) -> tuple[torch.Tensor, ...]:
    plan = DevicePlan.of(graph, backend.kernels)
    return tuple(t.clone() for t in backend.prepare(plan, weights).run(inputs))


__all__ = ["INSTRUCTION_SETS", "CpuBackend", "ExactCpuBackend", "ReferenceBackend", "run_graph", "run_op"]
