"""A split as a picture: devices are colours, tensors are bars that are cut by ownership."""

from __future__ import annotations

from html import escape

from motley.runtime.explain import Explanation, TensorRow

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d")
_WIDTH, _LEFT, _ROW, _BAR = 960, 230, 14, 10  # pixels; a bar has the width that _LEFT leaves


def draw(explanation: Explanation) -> str:
    """The picture as SVG text."""
    rows: list[str] = []
    y = _ROW
    for i, device in enumerate(explanation["devices"]):
        share = f"{device['achieved']:.1%} (asked {device['asked']:.1%})"
        label = f"{device['device']}: {device['weights'] / 2**20:.1f} MiB, {share}"
        rows += [_box(_LEFT, y, _BAR, colour(i), label), _label(_LEFT + 2 * _BAR, y, label, anchor="start")]
        y += _ROW
    for section in explanation["sections"]:
        weights = [t for t in section["tensors"] if t["kind"] != "activation" and t["state"] != "mapped"]
        if not weights and not section["collectives"]:
            continue
        y += _ROW
        rows.append(_label(8, y, section["name"], anchor="start", weight="bold"))
        for tensor in weights:
            rows += _bar(y, tensor, len(explanation["devices"]))
            y += _ROW
        for collective in section["collectives"]:
            text = f"⇄ {collective['kind']} {collective['tensor']}: {collective['bytes_per_token']} bytes a token"
            rows.append(_label(_LEFT, y, text, anchor="start", colour="#888"))
            y += _ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + _ROW}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *rows, "</svg>", ""])


def colour(device: int) -> str:
    return _COLOURS[device % len(_COLOURS)]


def _bar(y: int, tensor: TensorRow, n_devices: int) -> list[str]:
    """One tensor: its name, then its axis from left to right; what every device holds is striped."""
    full = _WIDTH - _LEFT - 10
    parts = [_label(_LEFT - 6, y, tensor["name"], anchor="end")]
    title = f"{tensor['name']} {tensor['type']} {tensor['shape']}: {tensor['state']}"
    if not tensor["owners"]:
        height = _BAR / n_devices
        return parts + [_box(_LEFT, y + i * height, full, colour(i), title, height) for i in range(n_devices)]
    x, total = float(_LEFT), sum(n for _, n in tensor["owners"])
    for device, n in tensor["owners"]:
        width = full * n / total
        parts.append(_box(x, y, width, colour(device), title))
        x += width
    return parts


def _box(x: float, y: float, width: float, fill: str, title: str, height: float = _BAR) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}"><title>{escape(title)}</title></rect>'


def _label(x: int, y: int, text: str, *, anchor: str, weight: str = "normal", colour: str = "#222") -> str:
    style = f'font-size="10" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x}" y="{y + _BAR - 1}" {style}>{escape(text)}</text>'
