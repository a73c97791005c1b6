"""A GPU beside a CPU, with the CPU's experts and with copies of them: the same answers as the GPU alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from motley import LLM
from motley.bench import write_random_model
from motley.bundled import bundled_experts_path
from motley.runtime import lending
from motley.runtime.crossover import measured_rows

TOKENS = [(7919 * i + 1) % 4000 for i in range(130)]


def logits_of(path: Path, **options: Any) -> npt.NDArray[np.float32]:
    with LLM(path, n_ctx=256, n_parallel=1, cache_type_k="f16", cache_type_v="f16", **options) as llm:
        return llm.logits(TOKENS)


@pytest.fixture(scope="module", params=["Q8_0", "Q4_K"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "Q8_0":
        return bundled_experts_path()
    made = tmp_path_factory.mktemp("models") / "experts.gguf"
    write_random_model(made, "qwen3-30b-a3b", "Q4_K", n_layers=3)
    return made


@pytest.mark.parametrize("rows", ["0", "96"])
def test_logits_are_those_of_the_gpu_alone(path: Path, monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    expected = logits_of(path, devices="cuda:0")
    monkeypatch.setenv("MOTLEY_BORROW_ROWS", rows)
    found = logits_of(path, devices="cuda:0,cpu", n_cpu_moe=99)
    # The CPU rounds activations to 8 bits, so that a token may choose another expert. Copies have the GPU's own bits.
    assert np.abs(found - expected).mean() <= (0.2 if rows == "0" else 0.02) * expected.std()


def test_rows_from_which_weights_are_copied_are_measured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOTLEY_BORROW_ROWS", raising=False)
    found: list[int | None] = []

    def watched(*args: Any) -> int | None:
        found.append(measured_rows(*args))
        return found[-1]

    monkeypatch.setattr(lending, "measured_rows", watched)
    logits_of(path, devices="cuda:0,cpu", n_cpu_moe=99)
    (rows,) = found
    assert rows is not None
