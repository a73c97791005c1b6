"""One device's plan, ready to run: on a thread of its own, or joined with the others of its GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from motley.backends.base import Executable, Joint
from motley.backends.cuda.program import Program
from motley.backends.cuda.runs import JointRun, ThreadRun


class CudaExecutable(Executable):
    def __init__(self, program: Program) -> None:
        self._program = program

    @classmethod
    def join(cls, members: Sequence[CudaExecutable]) -> Joint | None:
        """Joins devices on one GPU: they run in lockstep, from one thread."""
        programs = [member._program for member in members]
        return JointRun(programs) if len({program.device for program in programs}) == 1 else None

    @cached_property
    def _own_run(self) -> ThreadRun:
        return ThreadRun([self._program])

    def run(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        return self._own_run.run([inputs])[0]

    def record(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        return self._own_run.record([inputs])[0]

    @property
    def n_activation_bytes(self) -> int:
        return self._program.n_activation_bytes
