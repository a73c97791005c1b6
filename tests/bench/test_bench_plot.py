"""The picture of decode speed over depth."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

from motley.cli.bench_plot import Series, draw

ROOT = Path(__file__).parents[2]


def elements(picture: str, tag: str) -> list[ET.Element]:
    return [e for e in ET.fromstring(picture).iter() if e.tag.endswith(tag)]


def test_names_stand_apart_even_where_lines_end_together() -> None:
    series = [Series(f"type {i}", ((0, 9.0), (64, 5.0 + i / 100))) for i in range(4)]
    texts = elements(draw(series, "tiny"), "text")
    heights = [float(t.attrib["y"]) for t in texts if (t.text or "").startswith("type")]
    assert len(heights) == 4
    assert min(b - a for a, b in pairwise(heights)) >= 10


@pytest.mark.parametrize(
    ("fastest", "labels"),
    [(480, ["0", "100", "200", "300", "400", "500"]), (0.9, ["0", "0.2", "0.4", "0.6", "0.8", "1"])],
)
def test_the_grid_has_round_numbers_from_zero_to_above_the_fastest(fastest: float, labels: list[str]) -> None:
    texts = elements(draw([Series("f16", ((0, fastest), (100, fastest / 2)))], "tiny"), "text")
    assert [t.text for t in texts if t.attrib["text-anchor"] == "end"] == labels


def test_the_faster_point_is_the_higher_and_peers_are_dashed() -> None:
    picture = draw([Series("f16", ((0, 9.0), (8, 3.0)), is_dashed=True)], "tiny")
    first, second = (float(c.attrib["cy"]) for c in elements(picture, "circle"))
    assert first < second
    assert sum("stroke-dasharray" in e.attrib for e in elements(picture, "line")) == 1


def test_the_readmes_picture_is_drawn_from_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    picture, result = tmp_path / "picture.svg", tmp_path / "model.json"
    decode = {"weights": "Q4_K", "cache": "q8_0", "batch": 1, "new": 1, "tokens_per_s": 333.0}
    rows = [decode | {"depth": 0}, decode | {"depth": 64}, decode | {"depth": 64, "batch": 8}]
    result.write_text(json.dumps({"gpu": "G", "model": "M", "results": rows}))
    monkeypatch.setattr(sys, "argv", ["plot_depth", "--ours", str(result), "--out", str(picture)])
    import_module("benchmarks.plot_depth").main()
    titles = [t.text or "" for t in elements(picture.read_text(), "title")]
    assert [t for t in titles if t.startswith("Motley")] == [
        "Motley q8_0 at 0: 333.00 tokens/s",
        "Motley q8_0 at 64: 333.00 tokens/s",
    ]
    assert "llama.cpp q4_0 at 122880: 47.40 tokens/s" in titles
