"""What `benchmarks/standstill.py` says of a running request."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from motley import LLM

sys.path.append(str(Path(__file__).parents[2]))


@pytest.fixture(scope="module")
def standstill() -> Any:
    return import_module("benchmarks.standstill")


def test_long_gaps_are_named_after_what_came_before_their_end(standstill: Any) -> None:
    times = [0.0, 0.1, 0.5, 0.6, 2.0]
    marks = [(0.2, "a prompt"), (0.55, "three requests"), (3.0, "later")]
    assert standstill.long_gaps(times, marks) == [[0.4, "a prompt"], [1.4, "three requests"]]
    assert standstill.long_gaps(times[2:], []) == [[1.4, "the first tokens"]]
    assert standstill.long_gaps([1.0], marks) == []


def test_a_request_runs_beside_all_others(standstill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "OTHERS", ((1, 4), (2, 20)))
    with LLM(devices="cpu", n_ctx=512, n_parallel=4) as llm:
        monkeypatch.setattr(standstill, "N_CTX", 512)
        row = standstill.serve(llm, "a test")
    assert row["pieces"] > 1
    assert row["longest_gap_s"] > 0
    assert row["longest_step_s"] > 0


def test_every_crew_has_a_model_and_is_understood(standstill: Any) -> None:
    from motley.bench import SHAPES
    from motley.runtime import make_crew

    assert set(standstill.USUAL.split(",")) <= set(standstill.CREWS)
    for name, (shape, options) in standstill.CREWS.items():
        assert shape in SHAPES
        if name != "alone":
            assert len(make_crew("cpu,cpu", **options)) == 2
