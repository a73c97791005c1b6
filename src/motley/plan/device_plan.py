"""`DevicePlan`: one device's graph as a list of steps, each with its kernel, over one arena of activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from motley.graph import Graph, Tensor
from motley.graph.ops import Input, Weight
from motley.plan.kernels import Kernel, choose_kernel
from motley.plan.memory import MemoryLayout, lay_out


@dataclass(frozen=True)
class Step:
    """Compute `node` with `kernel`."""

    node: Tensor
    kernel: Kernel


@dataclass(frozen=True)
class DevicePlan:
    """Everything about running a graph that does not depend on the batch's data."""

    graph: Graph
    steps: tuple[Step, ...]
    layout: MemoryLayout

    @staticmethod
    def of(graph: Graph, candidates: Sequence[Kernel]) -> DevicePlan:
        steps = tuple(
            Step(node, choose_kernel(node, candidates))
            for node in graph.nodes
            if not (isinstance(node.op, Input | Weight) or node.op.is_constant)
        )
        return DevicePlan(graph, steps, lay_out(graph))

    def __str__(self) -> str:
        rows = [f"{s.node.name or s.node.op.name:<28} {s.kernel.name}" for s in self.steps]
        return "\n".join([*rows, f"activations: {self.layout.n_bytes} bytes"])
