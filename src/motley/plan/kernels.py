"""Choosing a kernel for each step: the first candidate that supports it, or an error that lists why none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from motley.errors import PlanError
from motley.graph import Tensor

Launch = Callable[[Sequence[Any], Any], Any]
"""A kernel ready to run: (values of the inputs, memory for the output or None) → the output's value."""


class Kernel(Protocol):
    """A way to compute some ops on some backend."""

    name: str

    def supports(self, node: Tensor) -> str | None:
        """None if it can compute `node`, otherwise the reason why not. Depends on nothing but `node`."""
        ...

    def prepare(self, node: Tensor) -> Launch: ...


def choose_kernel(node: Tensor, candidates: Sequence[Kernel]) -> Kernel:
    reasons = []
    for kernel in candidates:
        reason = kernel.supports(node)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    tried = "; ".join(reasons) or "the backend has no kernels"
    inputs = ", ".join(f"{t.dtype}{t.shape}" for t in node.inputs)
    raise PlanError(f"no kernel for {node.op.name}({inputs}) → {node.dtype}{node.shape}: {tried}")
