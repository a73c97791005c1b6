"""The plot of `motley effort-quality`: KL and speed over the bytes that a token reads, a dot for each effort."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from motley.cli.quality_plot import Scale
from motley.cli.svg import COLOURS, ROW, document, dot, label, line
from motley.quality import EffortQuality, EffortReport

_WIDTH, _HEIGHT = 900, 360  # pixels
_TOP, _BOTTOM = 60, 310  # of both plots
_KL, _SPEED = (60, 420), (500, 860)  # left and right edges of the two plots
_KINDS = ("fewer or more experts", "fewer layers", "both")
_MIN_KL = 1e-9  # smaller values are rounding errors


def draw(report: EffortReport, model: str) -> str:
    """The picture as SVG text."""
    rows = report.efforts
    most_bytes = max(row.bytes_per_token for row in (report.full, *rows)) / report.full.bytes_per_token
    title = f"{model}, {report.n_scored} tokens in contexts of {report.n_ctx}, against the full model"
    shapes = [label(8, ROW / 2, title, anchor="start", weight="bold"), *_legend(report)]
    kls = [math.log10(max(row.divergence.kl_mean, _MIN_KL)) for row in rows]
    low, high = math.floor(min(kls)), math.ceil(max(kls))
    kl = Scale(low, max(high, low + 1), _BOTTOM, _TOP)
    speeds = [_speed(report, row) for row in rows]
    speed = Scale(0, math.ceil(max(1.0, *speeds)), _BOTTOM, _TOP)
    for power in range(int(kl.low), int(kl.high) + 1):
        shapes += _grid_line(_KL, kl(power), f"1e{power}")
    for factor in range(int(speed.high) + 1):
        shapes += _grid_line(_SPEED, speed(factor), f"{factor} ×")
    shapes += _panel(report, _KL, most_bytes, "KL mean (nats)", lambda i: kl(kls[i]))
    shapes += _panel(report, _SPEED, most_bytes, "decoding speed", lambda i: speed(speeds[i]))
    return document(_WIDTH, _HEIGHT, shapes)


def _panel(
    report: EffortReport,
    edges: tuple[int, int],
    most_bytes: float,
    name: str,
    height: Callable[[int], float],
) -> Iterator[str]:
    """The dots of one plot, at the height that is given for each row, and lines between those of one kind."""
    across = Scale(0, most_bytes, *edges)
    yield label(edges[0], _TOP - 1.4 * ROW, name, anchor="start", colour="#666")
    for percent in range(0, int(100 * most_bytes) + 1, 25):
        x = across(percent / 100)
        yield label(x, _BOTTOM + 4, f"{percent} %", anchor="middle", colour="#666")
    words = "bytes per token, of the full model's"
    yield label(sum(edges) / 2, _BOTTOM + 1.4 * ROW, words, anchor="middle", colour="#666")
    full = report.full
    for kind, colour in zip(_KINDS, COLOURS, strict=False):
        places = [
            (across(row.bytes_per_token / full.bytes_per_token), height(i), row)
            for i, row in enumerate(report.efforts)
            if _kind(report, row) == kind
        ]
        places.sort(key=lambda place: place[0])
        if kind != "both":
            for (x1, y1, _), (x2, y2, _) in pairwise(places):
                yield line(x1, y1, x2, y2, colour)
        for x, y, row in places:
            text = f"{row.choice.describe()}: KL {row.divergence.kl_mean:.2e}, {row.tokens_per_second:.1f} tokens/s"
            number = row.choice.n_layers if kind == "fewer layers" else row.choice.n_experts
            yield dot(x, y, 4, colour, text)
            yield label(x, y - 1.2 * ROW, str(number), anchor="middle", colour=colour)


def _legend(report: EffortReport) -> Iterator[str]:
    used = {_kind(report, row) for row in report.efforts}
    x = 180.0
    for kind, colour in zip(_KINDS, COLOURS, strict=False):
        if kind in used:
            yield dot(x, ROW * 2.0, 4, colour, kind)
            yield label(x + 8, ROW * 1.6, kind, anchor="start")
            x += 150


def _kind(report: EffortReport, row: EffortQuality) -> str:
    has_experts = row.choice.n_experts != report.full.choice.n_experts
    has_layers = row.choice.n_layers != report.full.choice.n_layers
    return _KINDS[2 if has_experts and has_layers else 1 if has_layers else 0]


def _speed(report: EffortReport, row: EffortQuality) -> float:
    return row.tokens_per_second / report.full.tokens_per_second


def _grid_line(edges: tuple[int, int], y: float, text: str) -> list[str]:
    return [line(edges[0], y, edges[1], y, "#ddd"), label(edges[0] - 6, y - 5, text, anchor="end")]
