"""Byte counts as text: parsing and formatting."""

from __future__ import annotations

import re
from fractions import Fraction

from motley.errors import ConfigError

_PREFIXES = "KMGT"
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{tail}": 1024**n for n, prefix in enumerate(_PREFIXES, 1) for tail in ("", "B", "IB")
}


def parse_bytes(value: str | int) -> int:
    """The number of bytes in a text: `2GiB`, `512M`, `1.5 GB` (all powers of 1024) or a number of bytes."""
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*", str(value))
    n_bytes = 0 if match is None else int(Fraction(match[1]) * _UNITS.get(match[2].upper(), 0))
    if n_bytes <= 0:
        raise ConfigError(f"{value!r:.60} is not an amount of memory", hint="for example 2GiB or 512MiB")
    return n_bytes


def show_bytes(n_bytes: float) -> str:
    """A byte count as text: 1536 → '1.5 KiB'."""
    if n_bytes < 1024:
        return f"{n_bytes:.0f} B"
    n = 1
    while n_bytes >= 1024 ** (n + 1) and n < len(_PREFIXES):
        n += 1
    return f"{n_bytes / 1024**n:.1f} {_PREFIXES[n - 1]}iB"
