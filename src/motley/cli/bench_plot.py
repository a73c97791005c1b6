"""`motley bench` as a picture: decode speed over depth, one line for each KV cache type."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from motley.bench import Measurement
from motley.cli.svg import COLOURS, ROW, document, dot, label, line

_WIDTH, _HEIGHT = 720, 360  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 600, 40, 310  # of the plot


def draw(rows: Sequence[tuple[str, str, Measurement]], model: str) -> str:
    """The picture as SVG text, of (K type, V type, measurement); prompts are left out."""
    series: dict[str, list[tuple[int, float]]] = {}
    for k_type, v_type, m in rows:
        if not m.workload.is_prompt:
            name = k_type if k_type == v_type else f"{k_type}/{v_type}"
            series.setdefault(name, []).append((m.workload.depth, m.rate))
    points = [point for line_points in series.values() for point in line_points]
    deepest, fastest = max((d for d, _ in points), default=0) or 1, max((r for _, r in points), default=1.0)

    def place(depth: int, rate: float) -> tuple[float, float]:
        x = _LEFT + (_RIGHT - _LEFT) * depth / deepest
        return x, _BOTTOM - (_BOTTOM - _TOP) * rate / fastest

    shapes = [
        label(
            _LEFT,
            8,
            f"{model}: decode, tokens per second over tokens of context",
            anchor="start",
            weight="bold",
        ),
        line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "#888"),
        line(_LEFT, _TOP, _LEFT, _BOTTOM, "#888"),
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        y = _BOTTOM - (_BOTTOM - _TOP) * share
        shapes += [line(_LEFT, y, _RIGHT, y), label(_LEFT - 6, y - 5, f"{fastest * share:.1f}", anchor="end")]
    for depth in sorted({d for d, _ in points}):
        shapes.append(label(place(depth, 0)[0], _BOTTOM + 6, str(depth), anchor="middle"))
    for number, (name, line_points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(*point) for point in sorted(line_points)]
        for a, b in pairwise(places):
            shapes.append(line(*a, *b, colour, 2))
        for (x, y), (depth, rate) in zip(places, sorted(line_points), strict=True):
            shapes.append(dot(x, y, 3, colour, f"{name} at {depth}: {rate:.2f} tokens/s"))
        shapes.append(label(_RIGHT + 10, _TOP + number * ROW, name, anchor="start", colour=colour))
    return document(_WIDTH, _HEIGHT, shapes)
