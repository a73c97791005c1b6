"""One device's plan as segments: steps that need no other device, each segment up to the next collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from motley.backends.base import DeviceMessages, HasMessages
from motley.backends.cuda.borrowing import Borrowing
from motley.backends.cuda.capture import GraphPool
from motley.backends.cuda.staging import Staged
from motley.backends.cuda.steps import Step, Steps
from motley.backends.cuda.values import Values
from motley.backends.cuda.weights import BorrowedMatrix, DeviceWeight, Matrices
from motley.backends.paged import BatchLayer
from motley.formats import PackedTensor
from motley.graph import CACHE, HANDLES, I32, RECURRENT, Tensor
from motley.graph.ops import CausalConv, DeltaNet
from motley.plan import (
    AttentionBlock,
    DeltaRule,
    DevicePlan,
    Launch,
    LaunchKernel,
    Single,
    Stage,
    is_given,
    without_views,
)
from motley.split.collectives import Collective

_Dead = tuple[Tensor, ...]  # nodes that no later stage reads


class PlannedStep(NamedTuple):
    """A stage's step, and what no later stage reads."""

    stage: Stage
    step: Step
    dead: _Dead

    @property
    def depends_on_batch(self) -> bool:
        """Whether its launches differ from one prompt to the next one of the same plan: by sequences and contexts."""
        stage = self.stage
        is_recurrent = isinstance(stage, Single) and isinstance(stage.node.op, CausalConv | DeltaNet)
        return is_recurrent or isinstance(stage, AttentionBlock | DeltaRule)

    def run(self, values: Values) -> None:
        self.step(values)
        values.forget(self.dead)


@dataclass(frozen=True, eq=False)
class Segment:
    """Steps, and the collective after them; None at the program's end."""

    steps: tuple[PlannedStep, ...]
    collective: Tensor | None
    dead: _Dead  # after the collective

    def run(self, values: Values) -> None:
        for planned in self.steps:
            planned.run(values)


class Program:
    """A plan bound to its weights on one device."""

    def __init__(
        self,
        plan: DevicePlan,
        weights: Mapping[str, DeviceWeight],
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
        self.sizes = {node.name: node.shape[0] for node in graph.inputs if node.dtype == I32}
        # Inputs that are activations of another model (hidden states): they have a place, which a captured graph reads.
        self._floats = {
            node.name: torch.zeros(node.shape, device=self.device)
            for node in graph.inputs
            if node.dtype not in (*HANDLES, I32)
        }
        self.cache_names = [node.name for node in graph.inputs if node.dtype == CACHE]
        self.state_names = [node.name for node in graph.inputs if node.dtype == RECURRENT]
        self._fixed: dict[Tensor, Any] = {
            node: node.op.reference([]).to(self.device) for node in graph.nodes if node.op.is_constant
        }
        borrowed = _borrowed(plan.stages, weights)
        if borrowed:  # copies from the host's memory are no part of a graph
            self.captures = False
        for names in borrowed.values():
            matrices.borrowing.assign(names, [_source(weights[name]) for name in names])
        steps = Steps(graph, plan.stages, weights, matrices)
        self._borrowing, self._borrowed = matrices.borrowing, list(borrowed.values())
        prepare = partial(_prepare, steps, matrices.borrowing, borrowed)
        self.segments = _segments(plan.stages, graph.outputs, prepare)
        # How a device on a thread of its own takes part in each collective, by its node.
        self.launches: dict[Tensor, Launch] = {
            step.stage.outputs[0]: step.kernel.prepare(step.stage)
            for step in plan.steps
            if _is_collective(step.stage) and isinstance(step.kernel, LaunchKernel)
        }

        # A device beside a native program, whose collectives are kernels too.
        self.messages: DeviceMessages | None = next(
            (k.messages for step in plan.steps if isinstance(k := step.kernel, HasMessages) and k.messages),
            None,
        )

    def take_floats(self, inputs: Mapping[str, Any]) -> None:
        """Brings a batch's activations to their places. Rows that pad the plan keep what was there."""
        for name, place in self._floats.items():
            given = inputs[name]
            place[: len(given)].copy_(given, non_blocking=True)

    def begin(self, inputs: Mapping[str, Any], staged: Staged) -> Values:
        """Values to run with: what is given, before the first step."""
        if self._borrowed:
            self._borrowing.begin(self._borrowed)
        given: dict[Tensor, Any] = {}
        for node in self._inputs:
            if node.dtype == CACHE:
                cache: BatchLayer = inputs[node.name]
                given[node] = cache.layer, staged.places[cache.layer.group]
            elif node.dtype == RECURRENT:
                given[node] = inputs[node.name].layer, staged.spans
            elif node.name in self._floats:
                given[node] = self._floats[node.name]
            else:
                given[node] = staged.values[node.name]
        return Values(self._fixed | given)

    def outputs(self, values: Values) -> tuple[torch.Tensor, ...]:
        return tuple(values.plain(node) for node in self._outputs)


def _borrowed(stages: Sequence[Stage], weights: Mapping[str, DeviceWeight]) -> dict[Stage, list[str]]:
    """The stages that compute with borrowed weights, in order, with the names of these."""
    found: dict[Stage, list[str]] = {}
    for stage in stages:
        names = [t.name for t in stage.inputs if isinstance(weights.get(t.name), BorrowedMatrix)]
        if names:
            found[stage] = names
    return found


def _source(weight: DeviceWeight) -> PackedTensor:
    assert isinstance(weight, BorrowedMatrix)
    return weight.source


def _prepare(steps: Steps, borrowing: Borrowing, borrowed: Mapping[Stage, list[str]], stage: Stage) -> Step:
    """A stage's step, after the copy of its borrowed weights; the copy of the next stage's weights begins meanwhile."""
    step = steps.prepare(stage)
    if stage not in borrowed:
        return step
    after = list(borrowed)[list(borrowed).index(stage) + 1 :]
    return borrowing.around(step, borrowed[stage], [borrowed[each] for each in after])


def _segments(
    stages: Sequence[Stage], outputs: Sequence[Tensor], prepare: Callable[[Stage], Step]
) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    current: list[PlannedStep] = []
    for stage, dead in _with_dead(stages, outputs):
        if _is_collective(stage):
            segments.append(Segment(tuple(current), stage.outputs[0], dead))
            current = []
        else:
            current.append(PlannedStep(stage, prepare(stage), dead))
    return (*segments, Segment(tuple(current), None, ()))


def _is_collective(stage: Stage) -> bool:
    return isinstance(stage, Single) and isinstance(stage.node.op, Collective)


def _with_dead(stages: Sequence[Stage], outputs: Sequence[Tensor]) -> list[tuple[Stage, _Dead]]:
    """Each stage with the nodes that no later stage reads."""
    last: dict[Tensor, int] = {}
    for number, stage in enumerate(stages):
        last |= dict.fromkeys(map(without_views, (*stage.inputs, *stage.outputs)), number)
    keep = set(map(without_views, outputs))
    dead: list[list[Tensor]] = [[] for _ in stages]
    for node, number in last.items():
        if node not in keep and not is_given(node):
            dead[number].append(node)
    return [(stage, tuple(nodes)) for stage, nodes in zip(stages, dead, strict=True)]
