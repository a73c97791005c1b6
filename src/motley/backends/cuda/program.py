"""One device's plan as segments: steps that need nobody else, each segment up to where the device meets the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from motley.backends.cuda.capture import GraphPool
from motley.backends.cuda.lowering import Lowering, Stage
from motley.backends.cuda.staging import Staged
from motley.backends.cuda.steps import Step, Steps
from motley.backends.cuda.values import Values
from motley.backends.cuda.weights import Matrices
from motley.formats import PackedTensor
from motley.graph import CACHE, Tensor
from motley.graph.ops import Input
from motley.plan import DevicePlan, Launch
from motley.split.collectives import Collective

_Dead = tuple[Tensor, ...]  # nodes that nobody reads any more


@dataclass(frozen=True, eq=False)
class Segment:
    """Steps, and the collective after them; None at the program's end."""

    steps: tuple[tuple[Step, _Dead], ...]
    meeting: Tensor | None
    dead: _Dead  # after the meeting

    def run(self, values: Values) -> None:
        for step, dead in self.steps:
            step(values)
            values.forget(dead)


class Program:
    """A plan bound to its weights on one device."""

    def __init__(
        self,
        plan: DevicePlan,
        weights: Mapping[str, PackedTensor],
        matrices: Matrices,
        pool: GraphPool,
        *,
        captures: bool,
    ) -> None:
        graph = plan.graph
        self.device = matrices.device
        self.pool = pool
        self.captures = captures and self.device.type == "cuda"
        self.n_activation_bytes = plan.layout.n_bytes
        self._inputs, self._outputs = graph.inputs, graph.outputs
        self.sizes = {node.name: node.shape[0] for node in graph.inputs if node.dtype != CACHE}
        self.cache_names = [node.name for node in graph.inputs if node.dtype == CACHE]
        self._fixed: dict[Tensor, Any] = {
            node: node.op.reference([]).to(self.device) for node in graph.nodes if node.op.is_constant
        }
        stages = Lowering(graph).stages
        self.segments = _segments(stages, graph.outputs, Steps(graph, stages, weights, matrices))
        # How a device on a thread of its own talks to the others, by the collective's node.
        self.launches: dict[Tensor, Launch] = {
            step.node: step.kernel.prepare(step.node)
            for step in plan.steps
            if isinstance(step.node.op, Collective)
        }

    def begin(self, inputs: Mapping[str, Any], staged: Staged) -> Values:
        """Values to run with: what is given, before the first step."""
        given: dict[Tensor, Any] = {}
        for node in self._inputs:
            if node.dtype == CACHE:
                layer = inputs[node.name]
                given[node] = layer, staged.places[id(layer.batch)]
            else:
                given[node] = staged.values[node.name]
        return Values(self._fixed | given)

    def outputs(self, values: Values) -> tuple[torch.Tensor, ...]:
        return tuple(values.plain(node) for node in self._outputs)


def _segments(stages: Sequence[Stage], outputs: Sequence[Tensor], steps: Steps) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    current: list[tuple[Step, _Dead]] = []
    for stage, dead in _with_dead(stages, outputs):
        node = stage.outputs[0]
        if isinstance(node.op, Collective):
            segments.append(Segment(tuple(current), node, dead))
            current = []
        else:
            current.append((steps.prepare(stage), dead))
    return (*segments, Segment(tuple(current), None, ()))


def _with_dead(stages: Sequence[Stage], outputs: Sequence[Tensor]) -> list[tuple[Stage, _Dead]]:
    """Each stage with the nodes that nobody reads after it."""
    last: dict[Tensor, int] = {}
    for number, stage in enumerate(stages):
        last |= dict.fromkeys((*stage.inputs, *stage.outputs), number)
    keep = set(outputs)
    dead: list[list[Tensor]] = [[] for _ in stages]
    for node, number in last.items():
        if node not in keep and not isinstance(node.op, Input) and not node.op.is_constant:
            dead[number].append(node)
    return [(stage, tuple(nodes)) for stage, nodes in zip(stages, dead, strict=True)]
