"""Runs a plan step by step in torch, in the arena that the plan laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from motley.backends.base import Backend, Executable, LoadedWeight
from motley.formats import PackedTensor
from motley.graph import I32, Tensor
from motley.plan import DevicePlan, Kernel, Launch, LaunchKernel, Single, Stage, Step, is_view, owns_memory


class ReferenceKernel:
    """Any op, by its reference."""

    name = "reference"

    def supports(self, stage: Stage) -> str | None:
        is_plain = isinstance(stage, Single) and not stage.rotation
        return None if is_plain else "takes only single nodes"

    def prepare(self, stage: Stage) -> Launch:
        assert isinstance(stage, Single)
        op = stage.node.op

        def launch(inputs: Sequence[Any], out: torch.Tensor | None) -> Any:
            result = op.reference(inputs)
            return result if out is None else out.copy_(result)

        return launch


class ReferenceBackend(Backend):
    name: ClassVar[str] = "reference"
    has_trees = True

    @property
    def kernels(self) -> Sequence[Kernel]:
        return (ReferenceKernel(),)

    def load(self, weight: PackedTensor) -> PackedTensor:
        return PackedTensor(weight.data.clone(), weight.format)

    def prepare(self, plan: DevicePlan, weights: Mapping[str, LoadedWeight]) -> Executable:
        return ReferenceExecutable(plan, weights)


class ReferenceExecutable(Executable):
    def __init__(self, plan: DevicePlan, weights: Mapping[str, LoadedWeight]) -> None:
        self._plan = plan
        self._arena = torch.empty(plan.layout.n_bytes, dtype=torch.uint8)
        self._fixed: dict[Tensor, Any] = {node: weights[node.name] for node in plan.graph.weights}
        self._fixed |= {node: node.op.reference([]) for node in plan.graph.nodes if node.op.is_constant}
        self._steps = [
            (step.stage, _launch(step), self._memory(step.stage.outputs[0])) for step in plan.steps
        ]

    @property
    def n_activation_bytes(self) -> int:
        return self._plan.layout.n_bytes

    def run(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        values = dict(self._fixed)
        for node in self._plan.graph.inputs:
            values[node] = inputs[node.name]
        with torch.inference_mode():
            for stage, launch, memory in self._steps:
                values[stage.outputs[0]] = launch([_value(t, values) for t in stage.inputs], memory)
            return tuple(_value(t, values) for t in self._plan.graph.outputs)

    def _memory(self, node: Tensor) -> torch.Tensor | None:
        """The node's place in the arena, or None for views and cache handles."""
        if not owns_memory(node):
            return None
        start = self._plan.layout.offsets[node]
        dtype = torch.int32 if node.dtype == I32 else torch.float32
        return self._arena[start : start + node.n_values * 4].view(dtype).view(node.shape)


def _launch(step: Step) -> Launch:
    assert isinstance(step.kernel, LaunchKernel), f"{step.kernel.name} does not run by itself"
    return step.kernel.prepare(step.stage)


def _value(tensor: Tensor, values: Mapping[Tensor, Any]) -> Any:
    """The value of a node, or of a view of one."""
    return tensor.op.reference([_value(tensor.inputs[0], values)]) if is_view(tensor) else values[tensor]
