"""The pictures: labels that do not overlap, numbers that people write, and one row for each thing."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from typer.testing import Result

from motley.cli.bench_plot import Series, draw, show_rate
from motley.cli.quality_plot import draw as draw_quality
from motley.cli.svg import ROW
from motley.quality import Report, TypeQuality
from motley.quality.choices import CacheChoice
from motley.quality.divergence import Divergence
from motley.quality.verdict import Verdict
from random_models import LLAMA, RandomModel

Motley = Callable[..., Result]
_CHAR = 6.2  # pixels: a wide character of the font


def labels(svg: str) -> list[tuple[float, float, float, str]]:
    """(left, right, y, text) of each label."""
    found = []
    for element in ET.fromstring(svg).iter():
        if element.tag.endswith("text"):
            x, y, text = float(element.get("x", 0)), float(element.get("y", 0)), element.text or ""
            width = len(text) * _CHAR
            left = {"start": x, "middle": x - width / 2, "end": x - width}[
                element.get("text-anchor", "start")
            ]
            found.append((left, left + width, y, text))
    return found


def require_apart(svg: str) -> None:
    width = float(ET.fromstring(svg).get("width", 0))
    found = labels(svg)
    for left, right, _, text in found:
        assert left >= 0, text
        assert right <= width, text
    for a, b in combinations(found, 2):
        if abs(a[2] - b[2]) < ROW - 1:
            assert a[1] <= b[0] or b[1] <= a[0], (a, b)


def quality(choice: CacheChoice, change: float, error: float) -> TypeQuality:
    divergence = Divergence(0.01, 0.01, 0.2, 0.3, 0.9)
    verdict = Verdict.BROKEN
    return TypeQuality(choice, 1000.0, 1000.0, 20.0, 0.1, change, error, divergence, None, verdict)


@pytest.mark.parametrize("change", [-0.0012, 0.1991, 12.5, 1234.0])
def test_labels_of_the_quality_plot_do_not_overlap(change: float) -> None:
    choice = CacheChoice("q8_0", "q4_0", True)
    baseline = quality(CacheChoice("f32", "f32", False), 0.0, 0.0)
    rows = tuple(quality(replace(choice, is_rotated=i % 2 == 0), change, abs(change)) for i in range(4))
    require_apart(draw_quality(Report(512, 2048, baseline, rows), "some-model-q8_0.gguf"))


def test_rates_are_written_as_people_write_them() -> None:
    assert [show_rate(rate) for rate in (0.1234, 45.67, 999.4, 1039.6, 29522.0)] == [
        "0.123",
        "45.7",
        "999",
        "1 040",
        "29 522",
    ]
    series = [
        Series(name, ((0, rate), (8192, rate * 0.9)))
        for name, rate in (("Q8_0 f16", 1040.3), ("Q8_0 q8_0", 1041.0), ("Q4_0 q8_0/q4_0", 29522.0))
    ]
    svg = draw(series, "llama-1b")
    assert "e+" not in svg
    require_apart(svg)


def test_explain_shows_each_thing_once_and_leaves_no_cell_empty(motley: Motley, tmp_path: Path) -> None:
    class WithFrequencies(RandomModel):
        def _shapes(self) -> dict[str, tuple[int, ...]]:
            return super()._shapes() | {"rope_freqs.weight": (32,)}

    model = WithFrequencies("llama", 2, LLAMA.n_heads, LLAMA.n_kv_heads, LLAMA.keys)
    path = str(model.write(tmp_path / "model.gguf"))
    result = motley("explain", path, "--device", "cpu,cpu", "-sm", "tensor", "-ts", "3,1")
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert "blk.0.kv" not in rows
    assert rows["cache.0"][-3:] == ["2", "heads", "–"]
    assert rows["blk.0.attn_norm.weight"][-2:] == ["not", "used"]
    # Device 0 has all heads of a layer: it reads alone what both read in the other, from one copy.
    assert rows["rope_freqs.weight"][-5:] == ["mirrored", "128", "B", "128", "B"]
