"""A batch with prompts as CUDA graphs, and launches between them.

What a plan computes between attentions has the same shapes for every batch, so it is captured like a decode batch.
Attention and recurrent layers depend on the batch's sequences and contexts: they are launched anew each time, and their
results are copied to where the next graph reads them. Without this, a prompt of a few hundred tokens takes as long as
its launches: about twenty for each layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from motley.backends.cuda.capture import alias_of
from motley.backends.cuda.program import PlannedStep, Program
from motley.backends.cuda.values import Values
from motley.graph import Tensor
from motley.plan import is_given


class PromptGraphs:
    """The graphs of one program without collectives. Valid while the staging stays at `address`."""

    def __init__(self, program: Program, values: Values, address: int) -> None:
        """Captures, and computes this batch: `values` then has the program's outputs."""
        self.address = address
        self._program = program
        self._fixed: dict[
            tuple[int, ...], torch.Tensor
        ] = {}  # results of launched steps, by shape: one at a time
        self._parts: list[Callable[[Values], None]] = []
        waiting: list[PlannedStep] = []
        for planned in program.segments[0].steps:
            if planned.depends_on_batch:
                self._capture(waiting, values)
                waiting = []
                self._launch(planned, values)
            else:
                waiting.append(planned)
        self._capture(waiting, values)

    def replay(self, values: Values) -> None:
        """Compute another batch; `values`: what is given, before the first step."""
        for part in self._parts:
            part(values)

    def _capture(self, steps: list[PlannedStep], values: Values) -> None:
        def work() -> None:
            for planned in steps:
                planned.run(values)

        if steps:
            graph = self._program.pool.capture(work)
            graph.replay()
            self._parts.append(lambda _: graph.replay())

    def _launch(self, planned: PlannedStep, values: Values) -> None:
        """Run a step, and note how to do it again with other sequences in the same memory."""
        read = [node for node in planned.stage.inputs if not is_given(node)]
        inputs = {node: alias_of(tensor) for node, tensor in values.some(read).items()}
        (out,) = planned.stage.outputs
        planned.step(values)
        result = values.plain(out)
        if result.shape not in self._fixed:
            self._fixed[result.shape] = torch.empty_like(result, memory_format=torch.contiguous_format)
        fixed = self._fixed[result.shape]
        self._store(out, values, fixed)
        values.put(out, fixed)
        values.forget(planned.dead)

        def again(given: Values) -> None:
            for node, tensor in inputs.items():
                given.put(node, tensor)
            planned.step(given)
            self._store(out, given, fixed)
            given.forget([out, *inputs])

        self._parts.append(again)

    @staticmethod
    def _store(out: Tensor, values: Values, fixed: torch.Tensor) -> None:
        fixed.copy_(values.plain(out))
