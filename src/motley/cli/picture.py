"""Draws a split: each device has a colour, and each tensor is a bar in the colours of its owners."""

from __future__ import annotations

from motley.cli.svg import BAR, COLOURS, ROW, box, document, label
from motley.runtime.explain import Explanation, TensorRow

_WIDTH, _LEFT = 960, 230  # pixels; bars begin at _LEFT


def draw(explanation: Explanation) -> str:
    """The picture as SVG text."""
    rows: list[str] = []
    y = ROW
    for i, device in enumerate(explanation["devices"]):
        share = f"{device['achieved']:.1%} (asked {device['asked']:.1%})"
        text = f"{device['device']}: {device['weights'] / 2**20:.1f} MiB, {share}"
        rows += [box(_LEFT, y, BAR, colour(i), text), label(_LEFT + 2 * BAR, y, text, anchor="start")]
        y += ROW
    for section in explanation["sections"]:
        weights = [t for t in section["tensors"] if t["kind"] != "activation" and t["state"] != "mapped"]
        if not weights and not section["collectives"]:
            continue
        y += ROW
        rows.append(label(8, y, section["name"], anchor="start", weight="bold"))
        for tensor in weights:
            rows += _bar(y, tensor, len(explanation["devices"]))
            y += ROW
        for collective in section["collectives"]:
            text = f"⇄ {collective['kind']} {collective['tensor']}: {collective['bytes_per_token']} bytes a token"
            rows.append(label(_LEFT, y, text, anchor="start", colour="#888"))
            y += ROW
    return document(_WIDTH, y + ROW, rows)


def colour(device: int) -> str:
    return COLOURS[device % len(COLOURS)]


def _bar(y: int, tensor: TensorRow, n_devices: int) -> list[str]:
    """One tensor as SVG elements: its name, then its axis from left to right. A mirrored tensor is striped."""
    full = _WIDTH - _LEFT - 10
    parts = [label(_LEFT - 6, y, tensor["name"], anchor="end")]
    title = f"{tensor['name']} {tensor['type']} {tensor['shape']}: {tensor['state']}"
    if not tensor["owners"]:
        holders = [device for device, n in enumerate(tensor["bytes"]) if n] or list(range(n_devices))
        height = BAR / len(holders)
        return parts + [
            box(_LEFT, y + i * height, full, colour(device), title, height)
            for i, device in enumerate(holders)
        ]
    x, total = float(_LEFT), sum(n for _, n in tensor["owners"])
    for device, n in tensor["owners"]:
        width = full * n / total
        parts.append(box(x, y, width, colour(device), title))
        x += width
    return parts
