"""From how many rows a GPU copies the CPU's weights: decided by what both take, here with clocks of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from motley import LLM
from motley.backends import Backend, Executable, LoadedWeight, ReferenceBackend
from motley.bundled import bundled_experts_path
from motley.gguf import read_spec
from motley.graph import Tensor
from motley.models import BatchShape, GraphOptions, read_params
from motley.plan import DevicePlan
from motley.runtime import Crew, ModelSplit, lending, make_crew
from motley.runtime.crossover import MIN_ROWS, crossover, measured_rows
from motley.runtime.lending import settle_lending, settle_rows
from motley.runtime.loading import load_weights

PCIE_5, PCIE_3 = 6e-3, 27e-3  # seconds for a layer's experts of Qwen3-30B-A3B
CORES_15 = {32: 5.1e-3, 128: 8.3e-3}  # of the CPU: 4 ms of bytes, 33 µs a row
CORES_8 = {32: 10.5e-3, 128: 16.8e-3}


@pytest.mark.parametrize(
    ("seconds", "copying", "rows"),
    [
        (CORES_15, PCIE_5, 64),
        (CORES_15, PCIE_3, 768),
        (CORES_8, PCIE_5, 32),
        (CORES_8, PCIE_3, 256),
        ({32: 1.0, 128: 1.0}, 2.0, 2**16),  # rows cost nothing
        ({32: 1.1, 128: 1.0}, 1.05, 32),
        ({32: 1.0, 128: 1.1}, 1e9, 2**16),
        ({32: 1.0, 128: 1.1}, 0.0, 32),
    ],
)
def test_a_gpu_copies_from_the_rows_for_which_the_cpu_takes_longer(
    seconds: Mapping[int, float], copying: float, rows: int
) -> None:
    assert crossover(seconds, copying) == rows


def test_noise_changes_the_rows_seldom() -> None:
    for noise in (0.95, 1.05):
        assert crossover({n: s * noise for n, s in CORES_8.items()}, PCIE_3) == 256


class Borrower(ReferenceBackend):
    """A GPU that copies its experts in a given time."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__()
        self.seconds = seconds
        self.copied: list[LoadedWeight] = []

    def can_borrow(self, weight: Tensor) -> bool:
        return True

    def copy_seconds(self, weights: Sequence[LoadedWeight]) -> float | None:
        self.copied.extend(weights)
        return self.seconds


class Watched(ReferenceBackend):
    """Notes the shapes of what it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[int, ...]] = []

    def prepare(self, plan: DevicePlan, weights: Mapping[str, LoadedWeight]) -> Executable:
        executable = super().prepare(plan, weights)
        run = executable.run

        def watched(inputs: Mapping[str, Any]) -> Any:
            self.ran.append(tuple(plan.graph.outputs[0].shape))
            return run(inputs)

        executable.run = watched  # type: ignore[method-assign]
        return executable


def split_of(crew: Crew) -> ModelSplit:
    spec = read_spec(bundled_experts_path())
    return ModelSplit(spec, read_params(spec), crew, GraphOptions(32))


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Crew:
    """The second device has the experts of four layers and lends them to the first one."""
    monkeypatch.delenv("MOTLEY_BORROW_ROWS", raising=False)
    given = make_crew("cpu,cpu", n_cpu_moe=4)
    backends: list[Backend] = [Borrower(None), ReferenceBackend()]
    return settle_lending(given, backends, lambda: split_of(given))


def loaded(split: ModelSplit, device: int, backend: Backend) -> dict[str, LoadedWeight]:
    share = split.share(device, BatchShape(1, 1), lends=False)
    return load_weights(split.spec, [share], [backend], lambda work: [work(0)], None, [device])[0]


def test_the_cpu_runs_the_experts_of_one_layer_alone_and_the_gpu_copies_them(crew: Crew) -> None:
    split, owner, borrower = split_of(crew), Watched(), Borrower(0.27)
    weights = loaded(split, 1, owner)
    # Each run takes 10 ms with 32 rows and 30 ms with 128; four runs of each, the first of which is not counted.
    ticks = [t for n in (0.01, 0.03) for own in (1.0, n, n, n) for t in (1.0, own)]
    clock = iter(accumulate(ticks))
    rows = measured_rows(
        lambda n: split.share(1, BatchShape(n, 1), lends=False).graph,
        (owner, weights),
        (borrower, {name: weight for name, weight in weights.items() if "exps" in name}),
        lambda: next(clock),
    )
    n_embd = split.params.n_embd
    assert owner.ran == [(32, n_embd)] * 4 + [(128, n_embd)] * 4
    assert [id(weight) for weight in borrower.copied] == [
        id(weights[f"blk.0.ffn_{part}_exps.weight"]) for part in ("gate", "up", "down")
    ]
    assert rows == 1024 + 512  # 32 + (270 - 10) / 20 * 96 = 1,280, nearest by ratio to 1,536 and 1,024


def rows_of(split: ModelSplit) -> int:
    """The fewest rows that are lent for."""
    return next(n for n in range(1, 2**17) if split.is_lent(BatchShape(n, 1)))


@pytest.mark.parametrize(("measured", "rows"), [(48, 48), (1024, 1024), (None, 96)])
def test_rows_are_those_that_were_measured_or_the_usual_ones(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, measured: int | None, rows: int
) -> None:
    split = split_of(crew)
    assert rows_of(split) == MIN_ROWS  # there is memory for as few
    monkeypatch.setattr(lending, "measured_rows", lambda *_: measured)
    settle_rows(split, {0: Borrower(0.1), 1: ReferenceBackend()}, {0: {}, 1: {}})
    assert rows_of(split) == rows


def test_a_measurement_that_fails_does_not_keep_the_model_from_loading(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("no such memory")

    split = split_of(crew)
    monkeypatch.setattr(lending, "measured_rows", fail)
    settle_rows(split, {0: Borrower(0.1), 1: ReferenceBackend()}, {0: {}, 1: {}})
    assert rows_of(split) == 96
    assert "no such memory" in caplog.text


def test_rows_that_the_user_gives_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_BORROW_ROWS", "7")
    given = make_crew("cpu,cpu", n_cpu_moe=4)
    backends: list[Backend] = [Borrower(None), ReferenceBackend()]
    split = split_of(settle_lending(given, backends, lambda: split_of(given)))
    monkeypatch.setattr(lending, "measured_rows", lambda *_: pytest.fail("measured"))
    settle_rows(split, dict(enumerate(backends)), {0: {}, 1: {}})
    assert rows_of(split) == 7


@pytest.mark.parametrize(("seconds", "is_lent"), [(0.0, True), (1e9, False)])
def test_a_model_that_loads_measures_and_answers_as_one_device_does(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_lent: bool
) -> None:
    monkeypatch.delenv("MOTLEY_BORROW_ROWS", raising=False)
    settings: dict[str, Any] = {
        "backend": "reference",
        "n_ctx": 64,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
    }
    tokens = list(range(40, 80))
    with LLM(bundled_experts_path(), **settings) as llm:
        expected = llm.logits(tokens)
    monkeypatch.setattr(ReferenceBackend, "can_borrow", lambda *_: True)
    monkeypatch.setattr(ReferenceBackend, "borrow", lambda self, weights, n_ahead: dict(weights))
    monkeypatch.setattr(ReferenceBackend, "copy_seconds", lambda *_: seconds)
    with LLM(bundled_experts_path(), devices="cpu,cpu", n_cpu_moe=4, **settings) as llm:
        assert llm._loaded.split.is_lent(BatchShape(len(tokens), len(tokens))) == is_lent
        np.testing.assert_allclose(llm.logits(tokens), expected, atol=1e-3)
