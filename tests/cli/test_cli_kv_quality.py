"""`motley kv-quality`; tests/quality has the arithmetic."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from motley.bundled import bundled_model_path
from motley.cli.quality_plot import draw
from motley.quality import CacheChoice, Divergence, Evaluation, Recall, Report, TypeQuality, Verdict

Motley = Callable[..., Result]
TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 4
SMALL = ("-p", TEXT, "-c", "32", "--chunks", "2")


@pytest.fixture(scope="module")
def tiny(random_narrow: Path) -> str:
    return str(random_narrow)


def quality(choice: CacheChoice, kl: float, change: float, recall: Recall | None = None) -> TypeQuality:
    divergence = Divergence(kl, kl, 2 * kl, 3 * kl, max(0.0, 1 - kl))
    return TypeQuality(
        choice, 340, 1360, 5 + change, 0.1, change, 0.01, divergence, recall, Verdict.of(kl, change)
    )


REPORT = Report(
    n_ctx=32,
    n_scored=30,
    baseline=quality(CacheChoice("f32", "f32"), 0.0, 0.0, Recall(2, 2)),
    types=(
        quality(CacheChoice("q8_0", "q8_0", is_rotated=True), 1e-5, 0.0, Recall(2, 2)),
        quality(CacheChoice("q8_0", "q4_0"), 2.0, 1.5, Recall(1, 2)),
    ),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command would have measured; it gets REPORT instead."""
    seen: dict[str, Any] = {}

    def measure_types(
        path: Path, evaluation: Evaluation, choices: list[CacheChoice], **options: Any
    ) -> Report:
        seen.update(path=path, evaluation=evaluation, choices=choices, **options)
        return REPORT

    monkeypatch.setattr("motley.cli.kv_quality.measure_types", measure_types)
    return seen


def test_a_real_model_gets_a_verdict_for_each_type(motley: Motley, tiny: str, tmp_path: Path) -> None:
    plot = tmp_path / "kv.svg"
    result = motley("kv-quality", tiny, *SMALL, "--types", "f16,q8_0", "--json", "--plot", str(plot))
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["n_ctx"], report["scored_tokens"]) == (32, 30)
    assert [row["choice"] for row in report["types"]] == [
        {"k": "f16", "v": "f16", "is_rotated": False, "state": "f32"},
        # Heads of 24 dims are not rotated.
        {"k": "q8_0", "v": "q8_0", "is_rotated": False, "state": "f32"},
    ]
    f16, q8_0 = report["types"]
    assert f16["verdict"] == "as good as f16"
    assert 0 < f16["divergence"]["kl_mean"] < q8_0["divergence"]["kl_mean"]
    assert f16["bytes_per_token"] == 2 * 2 * 24 * 2 * 2
    assert "no rotation fits" in result.stderr
    assert ET.parse(plot).getroot().tag.endswith("svg")


def test_the_table_has_a_line_for_each_type(motley: Motley, tiny: str, asked: dict[str, Any]) -> None:
    result = motley("kv-quality", tiny, *SMALL)
    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines() if "%" in line]
    assert lines[1:] == [
        "f32 340 1,360 5.0000 +0.000% ± 1.000% 0.00e+00 0.00e+00 100.00% 2/2 baseline",
        "q8_0 yes 340 1,360 5.0000 +0.000% ± 1.000% 1.00e-05 2.00e-05 100.00% 2/2 as good as f16",
        "q8_0/q4_0 no 340 1,360 6.5000 +150.000% ± 1.000% 2.00e+00 4.00e+00 0.00% 1/2 broken for this model",
    ]


def test_flags_choose_types_rotation_baseline_and_crew(
    motley: Motley, random_llama: Path, asked: dict[str, Any]
) -> None:
    model = str(random_llama)
    flags = "--types q8_0,f16 --rotation on --baseline f16 --device cpu,cpu -sm tensor -ts 3,1 --backend reference"
    result = motley("kv-quality", model, *SMALL, *flags.split())
    assert result.exit_code == 0, result.stderr
    assert asked["choices"] == [CacheChoice("q8_0", "q8_0", is_rotated=True), CacheChoice("f16", "f16")]
    assert asked["baseline"] == CacheChoice("f16", "f16")
    assert (asked["devices"], asked["split_mode"], asked["tensor_split"]) == ("cpu,cpu", "tensor", "3,1")
    assert asked["backend"] == "reference"
    assert (asked["evaluation"].n_ctx, len(asked["evaluation"].chunks), asked["evaluation"].needles) == (
        32,
        2,
        (),
    )


def test_the_bundled_model_is_asked_for_needles(
    motley: Motley, tmp_path: Path, asked: dict[str, Any]
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night. The wind was loud. She went to the door. " * 200)
    args = ("kv-quality", "-f", str(book), "-c", "256", "--chunks", "1", "--needles", "3")
    assert motley(*args).exit_code == 0
    assert asked["path"] == bundled_model_path()
    assert len(asked["evaluation"].needles) == 3
    assert motley(*args, "--no-recall").exit_code == 0
    assert asked["evaluation"].needles == ()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no text to measure"),
        (("-p", "short"), "less than one context"),
        ((*SMALL, "--types", "q9"), "unknown KV cache type 'q9'"),
        ((*SMALL, "--baseline", "f16/f16/f16"), "3 types"),
        ((*SMALL, "--plot", "no/such/folder/kv.svg"), "cannot write no/such/folder/kv.svg"),
        ((*SMALL, "--plot", "."), "cannot write ."),
        ((*SMALL, "-c", "16", "--recall"), "no recall prompt of 0 tokens"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    motley: Motley, tiny: str, args: tuple[str, ...], message: str
) -> None:
    result = motley("kv-quality", tiny, *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_plot_has_a_mark_for_each_type_within_its_frame() -> None:
    root = ET.fromstring(draw(REPORT, "m<odel>.gguf"))
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    assert len(circles) == len(REPORT.types)
    assert 150 <= float(circles[0].attrib["cx"]) < float(circles[1].attrib["cx"]) <= 440
    bars = [e for e in root.iter() if e.tag.endswith("rect") and "x" in e.attrib]
    assert all(float(e.attrib["x"]) + float(e.attrib["width"]) <= 700 for e in bars)
    words = " ".join(e.text or "" for e in root.iter() if e.tag.endswith("text"))
    assert "m<odel>.gguf, 30 tokens" in words
    assert "broken for this model, recall 50%" in words


def test_a_plot_of_a_perfect_type_is_still_a_plot() -> None:
    perfect = quality(CacheChoice("f32", "f32"), 0.0, 0.0)
    root = ET.fromstring(draw(Report(32, 30, perfect, (perfect,)), "model"))
    assert not [e for e in root.iter() if e.tag.endswith("circle")]
