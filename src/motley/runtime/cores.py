"""Parses lists of cores, by number or by NUMA node, for devices whose threads are pinned."""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path

from motley.errors import DeviceError

NODES = Path("/sys/devices/system/node")  # Linux lists the cores of each NUMA node here


def parse_cores(text: str) -> tuple[int, ...]:
    """The cores named by `0-7`, `0+2+4`, `0-3+8-11` or `node0`; DeviceError for cores this process may not use."""
    if not hasattr(os, "sched_getaffinity"):
        raise DeviceError("this system does not bind threads to cores", hint="say cpu, and -t for threads")
    allowed = os.sched_getaffinity(0)
    if text.startswith("node"):
        return _cores_of_node(text, allowed)
    cores = _numbers(text.split("+"))
    if not cores:
        raise DeviceError(f"cpu:{text} names no cores", hint="for example cpu:0-7, cpu:0+2+4 or cpu:node0")
    forbidden = [core for core in cores if core not in allowed]
    if forbidden:
        raise DeviceError(
            f"cpu:{text}: this process may not use {_spell(forbidden)}", hint=f"it may use {_spell(allowed)}"
        )
    if len(set(cores)) < len(cores):
        raise DeviceError(f"cpu:{text} names a core twice", hint="each core runs one thread")
    return tuple(cores)


def _cores_of_node(name: str, allowed: set[int]) -> tuple[int, ...]:
    """The cores of a NUMA node that this process may use."""
    nodes = {path.parent.name: path for path in sorted(NODES.glob("node*/cpulist"))}
    if name not in nodes:
        raise DeviceError(f"cpu:{name}: no such NUMA node", hint=f"there are: {', '.join(nodes) or 'none'}")
    try:
        text = nodes[name].read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise DeviceError(
            f"cpu:{name}: {nodes[name]} cannot be read: {error.strerror}", hint="name cores: cpu:0-7"
        ) from None
    cores = [core for core in _numbers(text.strip().split(",")) if core in allowed]
    if not cores:
        raise DeviceError(
            f"cpu:{name}: this process may use none of the node's cores",
            hint=f"it may use {_spell(allowed)}",
        )
    return tuple(cores)


def _numbers(parts: list[str]) -> list[int]:
    """The numbers in ranges such as 0-3 and 8, in the given order; empty if one of them is not a range."""
    numbers: list[int] = []
    for part in parts:
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None:
            return []
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            return []
        numbers.extend(range(first, last + 1))
    return numbers


def _spell(cores: list[int] | set[int]) -> str:
    """Cores in the notation that `parse_cores` reads."""
    runs = [
        [core for _, core in run]
        for _, run in groupby(enumerate(sorted(cores)), key=lambda pair: pair[1] - pair[0])
    ]
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
