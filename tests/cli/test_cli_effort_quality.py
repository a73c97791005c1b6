"""`motley effort-quality`; tests/quality has the arithmetic."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from motley.bundled import bundled_experts_path
from motley.cli.effort_plot import draw
from motley.quality import Divergence, EffortChoice, EffortQuality, EffortReport

Motley = Callable[..., Result]
TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 4
SMALL = ("-p", TEXT, "-c", "32", "--chunks", "1")


def quality(choice: EffortChoice, kl: float, rate: float, n_bytes: int) -> EffortQuality:
    return EffortQuality(
        choice, n_bytes, rate, 1.0, 5 + kl, 0.1, kl / 5, 0.01, Divergence(kl, kl, 2 * kl, 3 * kl, 0.5)
    )


FULL = quality(EffortChoice(4, 6), 0.0, 10.0, 4096)
REPORT = EffortReport(
    32,
    30,
    FULL,
    (
        quality(EffortChoice(2, 6), 0.5, 15.0, 3072),
        quality(EffortChoice(8, 6), 1e-3, 6.0, 6144),
        quality(EffortChoice(4, 3), 2.0, 20.0, 2048),
        quality(EffortChoice(2, 3), 3.0, 25.0, 1536),
    ),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command would have measured; it gets REPORT instead."""
    seen: dict[str, Any] = {}

    def measure_efforts(path: Path, evaluation: Any, full: Any, choices: Any, **options: Any) -> EffortReport:
        seen.update(path=path, evaluation=evaluation, full=full, choices=choices, **options)
        return REPORT

    monkeypatch.setattr("motley.cli.effort_quality.measure_efforts", measure_efforts)
    return seen


def test_a_real_mixture_of_experts_is_measured(motley: Motley, tmp_path: Path) -> None:
    plot = tmp_path / "effort.svg"
    flags = ("--experts", "2", "--layers", "3", "--json", "--plot", str(plot))
    result = motley("effort-quality", str(bundled_experts_path()), *SMALL, *flags)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["n_ctx"], report["scored_tokens"]) == (32, 15)
    assert report["full"]["choice"] == {"n_experts": 4, "n_layers": 6}
    assert [row["choice"] for row in report["efforts"]] == [
        {"n_experts": 2, "n_layers": 6},
        {"n_experts": 4, "n_layers": 3},
    ]
    assert all(row["divergence"]["kl_mean"] > 0 for row in report["efforts"])
    assert ET.parse(plot).getroot().tag.endswith("svg")


def test_a_real_dense_model_is_measured_by_layers(motley: Motley, random_narrow: Path) -> None:
    result = motley("effort-quality", str(random_narrow), *SMALL)
    assert result.exit_code == 0, result.stderr
    assert "experts" not in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if "%" in line and "±" in line]
    assert [row[0] for row in rows[1:]] == ["2", "1"]


def test_the_table_has_a_line_for_each_effort(motley: Motley, asked: dict[str, Any]) -> None:
    result = motley("effort-quality", str(bundled_experts_path()), *SMALL)
    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines() if "e+0" in line or "e-0" in line]
    assert lines[:2] == [
        "4 6 4.0 KiB 10.0 1.0 1.00 × 5 ± 0.1 0.00e+00 0.00e+00 50.00%",
        "2 6 3.0 KiB 15.0 1.0 1.50 × 5.5 ± 0.1 +10.00% ± 1.00% 5.00e-01 1.00e+00 50.00%",
    ]
    assert len(lines) == 5


def test_flags_choose_efforts_cache_and_crew(motley: Motley, asked: dict[str, Any]) -> None:
    flags = "--experts 2 --layers 3 --grid -ctk q8_0 --device cpu,cpu -sm tensor -ts 3,1"
    result = motley("effort-quality", str(bundled_experts_path()), *SMALL, *flags.split())
    assert result.exit_code == 0, result.stderr
    assert asked["full"] == EffortChoice(4, 6)
    assert set(asked["choices"]) == {EffortChoice(2, 6), EffortChoice(4, 3), EffortChoice(2, 3)}
    assert (asked["devices"], asked["tensor_split"], asked["cache_type_k"]) == ("cpu,cpu", "3,1", "q8_0")
    assert len(asked["evaluation"].chunks) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no text to measure"),
        ((*SMALL, "--experts", "17"), "--experts 17 is not possible"),
        ((*SMALL, "--layers", "0"), "--layers 0 is not possible"),
        ((*SMALL, "--layers", "two"), "--layers 'two' is not a list of numbers"),
        ((*SMALL, "--n-expert-used", "2"), "use --experts and --layers"),
        ((*SMALL, "--plot", "no/such/folder/e.svg"), "cannot write no/such/folder/e.svg"),
    ],
)
def test_what_cannot_be_measured_is_an_error(motley: Motley, args: tuple[str, ...], message: str) -> None:
    result = motley("effort-quality", str(bundled_experts_path()), *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_plot_has_two_marks_for_each_effort_within_its_frame() -> None:
    root = ET.fromstring(draw(REPORT, "m<odel>.gguf"))
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    legend = 3
    assert len(circles) == legend + 2 * len(REPORT.efforts)
    assert all(60 <= float(e.attrib["cx"]) <= 860 for e in circles)
    assert all(60 <= float(e.attrib["cy"]) <= 310 for e in circles[legend:])
    words = " ".join(e.text or "" for e in root.iter() if e.tag.endswith("text"))
    assert "m<odel>.gguf, 30 tokens" in words
    assert "fewer layers" in words


def test_a_plot_of_efforts_without_a_difference_is_still_a_plot() -> None:
    same = quality(EffortChoice(2, 6), 0.0, 10.0, 4096)
    root = ET.fromstring(draw(EffortReport(32, 30, FULL, (same,)), "model"))
    assert len([e for e in root.iter() if e.tag.endswith("circle")]) == 1 + 2
