"""The plot of `motley bench`: decode speed over depth of context, one line for each KV cache type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10

from motley.cli.svg import COLOURS, ROW, document, dot, label, line

_WIDTH, _HEIGHT = 780, 360  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 590, 40, 315  # of the plot
_GRID_LINES = 6  # at most


@dataclass(frozen=True)
class Series:
    """One line of the plot: (depth, tokens per second), by depth. A dashed line is for comparison."""

    name: str
    points: tuple[tuple[int, float], ...]
    colour: str = COLOURS[0]
    is_dashed: bool = False


@dataclass(frozen=True)
class _Scale:
    """Converts depths and rates to pixels."""

    deepest: int
    fastest: float

    def x(self, depth: int) -> float:
        return _LEFT + (_RIGHT - _LEFT) * depth / self.deepest

    def y(self, rate: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * rate / self.fastest


def draw(series: Sequence[Series], title: str) -> str:
    """The plot as SVG text. The axis of rates begins at 0."""
    points = [point for each in series for point in each.points]
    step = _step(max((rate for _, rate in points), default=1.0))
    n_steps = ceil(max((rate for _, rate in points), default=1.0) / step)
    scale = _Scale(max((depth for depth, _ in points), default=0) or 1, n_steps * step)
    heading = f"{title}: decode, tokens per second over tokens of context"
    shapes = [label(_LEFT, 8, heading, anchor="start", weight="bold")]
    for i in range(n_steps + 1):
        y = scale.y(i * step)
        shapes.append(line(_LEFT, y, _RIGHT, y, "#888" if i == 0 else "#ddd"))
        shapes.append(label(_LEFT - 6, y - 5, show_rate(i * step), anchor="end"))
    for depth in sorted({depth for depth, _ in points}):
        shapes.append(label(scale.x(depth), _BOTTOM + 6, f"{depth:,}".replace(",", " "), anchor="middle"))
    for each in series:
        shapes += _curve(each, scale)
    return document(_WIDTH, _HEIGHT, [*shapes, *_names(series, scale)])


def _curve(series: Series, scale: _Scale) -> Iterator[str]:
    places = [(scale.x(depth), scale.y(rate)) for depth, rate in series.points]
    for a, b in pairwise(places):
        yield line(*a, *b, series.colour, 2, is_dashed=series.is_dashed)
    for (x, y), (depth, rate) in zip(places, series.points, strict=True):
        yield dot(x, y, 3, series.colour, f"{series.name} at {depth}: {rate:.2f} tokens/s")


def _names(series: Sequence[Series], scale: _Scale) -> Iterator[str]:
    """Labels with each line's name and last rate, beside its end. Labels that would overlap are moved apart."""
    ordered = sorted(series, key=lambda each: -each.points[-1][1])
    places: list[float] = []
    for each in ordered:
        places.append(max([scale.y(each.points[-1][1]) - 5, *(y + ROW for y in places[-1:])]))
    below = float(_BOTTOM)
    for index in reversed(range(len(places))):  # none below the axis
        places[index] = min(places[index], below - ROW)
        below = places[index]
    for each, y in zip(ordered, places, strict=True):
        text = f"{each.name}: {show_rate(each.points[-1][1])}"
        yield label(_RIGHT + 10, y, text, anchor="start", colour=each.colour)


def show_rate(rate: float) -> str:
    """Three digits of a rate, or all digits before the point: 0.123, 45.6, 1 040."""
    return f"{rate:.3g}" if rate < 999.5 else f"{rate:,.0f}".replace(",", " ")


def _step(fastest: float) -> float:
    """The distance between grid lines: 1, 2 or 5 times a power of ten."""
    rough = fastest / _GRID_LINES
    power: float = 10.0 ** floor(log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
