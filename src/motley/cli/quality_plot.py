"""The plot of `motley kv-quality`: a line for each type, with its KL, its perplexity and its verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass

from motley.cli.svg import BAR, COLOURS, ROW, box, document, dot, label, line
from motley.quality import Report, TypeQuality

_WIDTH, _TOP = 1080, 4 * ROW  # pixels
_NAME_END, _VERDICT = 130, 840  # pixels: right edge of names, left edge of verdicts
_KL, _CHANGE = (150, 440), (500, 700)  # left and right edges of the two plots
_MAX_CHANGE = 0.1  # longest bar: a broken type must not flatten the others
_ROTATED, _PLAIN = COLOURS[0], COLOURS[1]


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to pixels from `left` to `right`."""

    low: float
    high: float
    left: float
    right: float

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.left + share * (self.right - self.left)


def draw(report: Report, model: str) -> str:
    """The picture as SVG text."""
    rows = report.types
    bottom = _TOP + len(rows) * ROW
    kl, change = _kl_scale(rows), _change_scale(rows)
    against = report.baseline.choice.name
    title = f"{model}, {report.n_scored} tokens in contexts of {report.n_ctx}, against a cache in {against}"
    shapes = [label(8, ROW / 2, title, anchor="start", weight="bold"), *_legend(ROW * 1.6)]
    shapes += [
        label(kl.left, ROW * 2.6, "KL: mean, and 99th percentile (nats)", anchor="start", colour="#666"),
        label(change.left, ROW * 2.6, "change of perplexity", anchor="start", colour="#666"),
        *_decades(kl, bottom),
        line(change(0), _TOP, change(0), bottom, "#888"),
    ]
    for number, row in enumerate(rows):
        y = _TOP + number * ROW
        colour = _ROTATED if row.choice.is_rotated else _PLAIN
        shapes.append(label(_NAME_END, y, row.choice.name, anchor="end"))
        shapes += _kl_marks(kl, y, row, colour) + _change_marks(change, y, row, colour)
        recall = f", recall {row.recall.share:.0%}" if row.recall is not None else ""
        shapes.append(label(_VERDICT, y, row.verdict.words + recall, anchor="start"))
    return document(_WIDTH, bottom + 2 * ROW, shapes)


def _legend(y: float) -> list[str]:
    shapes = []
    for number, (colour, text) in enumerate(((_ROTATED, "rotated"), (_PLAIN, "not rotated"))):
        x = _KL[0] + 90 * number
        shapes += [box(x, y, BAR, colour, text), label(x + 2 * BAR, y, text, anchor="start")]
    return shapes


def _kl_scale(rows: tuple[TypeQuality, ...]) -> Scale:
    """A logarithmic scale between whole powers of ten, over all KL values that are not 0."""
    values = [kl for row in rows for kl in (row.divergence.kl_mean, row.divergence.kl_p99) if kl > 0] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return Scale(low, max(high, low + 1), *_KL)


def _change_scale(rows: tuple[TypeQuality, ...]) -> Scale:
    ends = [row.perplexity_change + sign * row.perplexity_change_error for row in rows for sign in (-1, 1)]
    limit = min(max(*ends, 0.001), _MAX_CHANGE)
    return Scale(max(min(*ends, 0.0), -limit), limit, *_CHANGE)


def _decades(kl: Scale, bottom: float) -> list[str]:
    shapes = []
    for power in range(int(kl.low), int(kl.high) + 1):
        x = kl(power)
        shapes += [line(x, _TOP, x, bottom), label(x, bottom, f"1e{power}", anchor="middle", colour="#666")]
    return shapes


def _kl_marks(kl: Scale, y: float, row: TypeQuality, colour: str) -> list[str]:
    mean, p99 = row.divergence.kl_mean, row.divergence.kl_p99
    if mean <= 0:
        return []  # 0 has no place on a logarithmic axis
    x, middle = kl(math.log10(mean)), y + BAR / 2
    title = f"{row.choice.name}: mean {mean:.2e}, 99 % below {p99:.2e}"
    whisker = line(x, middle, kl(math.log10(max(p99, mean))), middle, colour)
    return [whisker, dot(x, middle, BAR / 2.5, colour, title)]


def _percent(value: float, sign: str = "") -> str:
    return f"{value:{sign}.2%}" if abs(value) < 1 else f"{value:{sign}.0%}"


def _change_marks(change: Scale, y: float, row: TypeQuality, colour: str) -> list[str]:
    value, error = row.perplexity_change, row.perplexity_change_error
    zero, end = change(0), change(value)
    text = f"{_percent(value, '+')} ± {_percent(error)}"
    middle = y + BAR / 2
    return [
        box(min(zero, end), y, abs(end - zero), colour, f"{row.choice.name}: {text}"),
        line(change(value - error), middle, change(value + error), middle, "#222"),
        label(_CHANGE[1] + 6, y, text, anchor="start", colour="#666"),
    ]
