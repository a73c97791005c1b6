"""Choosing kernels: the first that fits; none: every candidate's reason."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from motley.errors import PlanError
from motley.graph import F32, Graph
from motley.graph.ops import Input, Scale
from motley.plan import DevicePlan, Stage


@dataclass(frozen=True)
class Candidate:
    name: str
    reason: str | None

    def supports(self, stage: Stage) -> str | None:
        return self.reason


GRAPH = Graph.of(Scale(2.0)(Input((2, 3), F32)(name="x"), name="double"))


def test_the_first_candidate_that_fits_is_taken() -> None:
    plan = DevicePlan.of(
        GRAPH, [Candidate("fast", "needs 32 columns"), Candidate("slow", None), Candidate("x", None)]
    )
    assert [step.kernel.name for step in plan.steps] == ["slow"]
    assert "double" in str(plan)
    assert "slow" in str(plan)


def test_the_error_lists_each_candidate_and_its_reason() -> None:
    with pytest.raises(PlanError, match=r"no kernel for scale\(f32\(2, 3\)\).*a: too wide; b: no gpu"):
        DevicePlan.of(GRAPH, [Candidate("a", "too wide"), Candidate("b", "no gpu")])
