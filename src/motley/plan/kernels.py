"""Choosing a kernel for each stage: the first candidate that supports it, or an error that lists why none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from motley.errors import PlanError
from motley.plan.stages import Stage, describe

Launch = Callable[[Sequence[Any], Any], Any]
"""A kernel ready to run: (values of the inputs, memory for the output or None) → the output's value."""


class Kernel(Protocol):
    """A way to compute some stages on some backend."""

    name: str

    def supports(self, stage: Stage) -> str | None:
        """None if it can compute `stage`, otherwise the reason why not. Depends on nothing but `stage`."""
        ...


@runtime_checkable
class LaunchKernel(Kernel, Protocol):
    """A kernel that runs alone, without the rest of a plan."""

    def prepare(self, stage: Stage) -> Launch: ...


def choose_kernel(stage: Stage, candidates: Sequence[Kernel]) -> Kernel:
    reasons = []
    for kernel in candidates:
        reason = kernel.supports(stage)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    tried = "; ".join(reasons) or "the backend has no kernels"
    raise PlanError(f"no kernel for {describe(stage)}: {tried}")
