"""The shapes that Motley's plots consist of, as SVG text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d")
ROW, BAR = 14, 10  # pixels: height of a line, and of a bar in it


def document(width: int, height: int, shapes: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *shapes, "</svg>", ""])


def box(x: float, y: float, width: float, fill: str, title: str, height: float = BAR) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}"><title>{escape(title)}</title></rect>'


def dot(x: float, y: float, radius: float, fill: str, title: str) -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"'
    return f'<circle {place} fill="{fill}"><title>{escape(title)}</title></circle>'


def line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    colour: str = "#ccc",
    width: float = 1,
    *,
    is_dashed: bool = False,
) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
    return f'<line {place} stroke="{colour}" stroke-width="{width:.1f}"{dashes}/>'


def label(x: float, y: float, text: str, *, anchor: str, weight: str = "normal", colour: str = "#222") -> str:
    """A text element on the line whose bars begin at `y`. `anchor`: start, middle or end of the text is at `x`."""
    style = f'font-size="10" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y + BAR - 1:.1f}" {style}>{escape(text)}</text>'
