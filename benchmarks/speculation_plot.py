"""The plot of `benchmarks speculation`: a bar for each workload, drafter and number of requests."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from motley.cli.svg import COLOURS, ROW, box, document, label, line

_WIDTH, _LEFT, _RIGHT, _TOP = 780, 220, 720, 40


def draw(results: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per second with drafts, relative to without, as SVG text."""
    most = max([2.0, *(r["ratio"] for r in results)])
    scale = (_RIGHT - _LEFT) / most
    colours = {
        name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(_name(r) for r in results))
    }
    height = _TOP + ROW * len(results) + 30
    shapes = [label(12, 8, "Speed with drafts : without, the same text", anchor="start", weight="bold")]
    for number, r in enumerate(results):
        y = _TOP + ROW * number
        title = f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
        shapes.append(label(_LEFT - 8, y, f"{r['workload']}, {_name(r)}, {r['n_requests']}", anchor="end"))
        shapes.append(box(_LEFT, y, r["ratio"] * scale, colours[_name(r)], title))
        shapes.append(label(_LEFT + r["ratio"] * scale + 6, y, f"{r['ratio']:.2f}", anchor="start"))
    shapes.append(line(_LEFT + scale, _TOP - 6, _LEFT + scale, height - 24, "#444"))
    return document(_WIDTH, height, shapes)


def _name(result: Mapping[str, Any]) -> str:
    return str(result["drafter"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws the results of `benchmarks speculation --json`.")
    parser.add_argument("results", type=Path)
    parser.add_argument("plot", type=Path)
    given = parser.parse_args()
    given.plot.write_text(draw(json.loads(given.results.read_text())))
