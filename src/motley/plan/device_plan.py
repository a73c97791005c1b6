"""`DevicePlan`: one device's graph as a list of steps, each a stage with its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from motley.graph import Graph, Tensor
from motley.plan.kernels import Kernel, choose_kernel
from motley.plan.memory import MemoryLayout, lay_out, value_buffers
from motley.plan.rules import fuse
from motley.plan.stages import Stage


@dataclass(frozen=True)
class Step:
    """Compute `stage` with `kernel`."""

    stage: Stage
    kernel: Kernel


@dataclass(frozen=True)
class DevicePlan:
    """Everything about running a graph that does not depend on the batch's data."""

    graph: Graph
    steps: tuple[Step, ...]

    @staticmethod
    def of(graph: Graph, candidates: Sequence[Kernel]) -> DevicePlan:
        """The largest stages that the candidates take; PlanError for a node that no candidate supports."""
        stages = fuse(graph, lambda stage: any(kernel.supports(stage) is None for kernel in candidates))
        return DevicePlan(graph, tuple(Step(stage, choose_kernel(stage, candidates)) for stage in stages))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(step.stage for step in self.steps)

    @cached_property
    def layout(self) -> MemoryLayout[Tensor]:
        """The layout of the values that stages make. A backend that keeps more than values lays out its own buffers."""
        return lay_out(value_buffers(self.stages, self.graph.outputs))

    def __str__(self) -> str:
        rows = []
        for step in self.steps:
            out = step.stage.outputs[0]
            rows.append(f"{out.name or out.op.name:<28} {type(step.stage).__name__:<16} {step.kernel.name}")
        return "\n".join([*rows, f"activations: {self.layout.n_bytes} bytes"])


def activation_bytes(graph: Graph) -> int:
    """The bytes of a graph's activations if nothing is fused: more than any backend's plan needs."""
    return lay_out(value_buffers(fuse(graph, lambda stage: False), graph.outputs)).n_bytes
