"""From the mapped file to devices: each takes its part of each weight, straight from the map."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from motley.backends import Backend
from motley.errors import SplitError
from motley.formats import PackedTensor, get_format
from motley.gguf import ModelSpec
from motley.graph import Graph, Tensor
from motley.graph.ops import GetRows, Weight
from motley.models.builder import Ranges
from motley.ownership import MIRRORED, Split, State
from motley.split.localize import LocalGraph

_AT_A_TIME = 32 << 20  # bytes

Progress = Callable[[int, int], None]
"""Called while loading with (bytes done, bytes in all)."""


def load_weights(
    spec: ModelSpec,
    shares: Sequence[LocalGraph],
    backends: Sequence[Backend],
    on_all: Callable[[Callable[[int], None]], Any],
    progress: Progress | None = None,
) -> list[dict[str, PackedTensor]]:
    """Each device's weights by their name in its graph. What is only looked up by row stays mapped.

    `on_all(work)` runs work(device) on every device and waits. It is called for some megabytes at a time, so that
    `progress` is called, and an interrupt is heard, by the caller's own thread.
    """
    loaders = [
        _Loader(spec, share, backend, device)
        for device, (share, backend) in enumerate(zip(shares, backends, strict=True))
    ]
    total = sum(map(weight_bytes, shares))
    while not all(loader.is_done for loader in loaders):
        on_all(lambda device: loaders[device].load_some())
        if progress is not None:
            progress(min(sum(loader.n_bytes for loader in loaders), total), total)
    return [loader.weights for loader in loaders]


class _Loader:
    """Loads one device's weights, some at a time."""

    def __init__(self, spec: ModelSpec, share: LocalGraph, backend: Backend, device: int) -> None:
        self.weights: dict[str, PackedTensor] = {}
        self.n_bytes = 0
        self._spec, self._share, self._backend, self._device = spec, share, backend, device
        self._mapped = _mapped(share)
        # The largest last, to be taken from the end: a tensor's pages of the file are resident beside its copy, which
        # costs least as long as there are few copies.
        self._waiting = sorted(share.graph.weights, key=packed_bytes)
        # Tied weights that lie alike share memory.
        self._memo: dict[tuple[str, Ranges, State], PackedTensor] = {}

    @property
    def is_done(self) -> bool:
        return not self._waiting

    def load_some(self) -> None:
        enough = self.n_bytes + _AT_A_TIME
        while self._waiting and self.n_bytes < enough:
            node = self._waiting.pop()
            assert isinstance(node.op, Weight)
            self.weights[node.name] = self._get(node, node.op)

    def _get(self, node: Tensor, op: Weight) -> PackedTensor:
        if node in self._mapped:
            return self._spec.tensor(op.source)
        state = self._share.layouts[node.name]
        key = op.source, op.rows, state
        if key not in self._memo:
            part = part_of(self._spec.tensor(op.source), state, self._device, op.rows)
            self._memo[key] = self._backend.load(part)
            self.n_bytes += self._memo[key].nbytes
            _forget(self._spec, op.source)
        return self._memo[key]


def _forget(spec: ModelSpec, name: str) -> None:
    """Let go of a tensor's pages of the mapped file, now that it has been copied; touching it maps them again."""
    info = spec.tensors[name]
    page = mmap.PAGESIZE
    start, stop = -(-info.offset // page) * page, (info.offset + info.nbytes) // page * page
    if start < stop and sys.platform == "linux":
        spec.parts[info.part].data.madvise(mmap.MADV_DONTNEED, start, stop - start)


def lookup_tables(graph: Graph) -> set[Tensor]:
    """Weights that are only read by row."""
    users: dict[Tensor, list[Tensor]] = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            users.setdefault(tensor, []).append(node)
    return {
        weight
        for weight in graph.weights
        if all(isinstance(user.op, GetRows) and user.inputs[0] is weight for user in users.get(weight, []))
    }


def _mapped(share: LocalGraph) -> set[Tensor]:
    """What a device reads from the mapped file: rows of whole tables."""
    return {t for t in lookup_tables(share.graph) if share.layouts[t.name] == MIRRORED}


def weight_bytes(share: LocalGraph) -> int:
    """Bytes of the weights that a device loads."""
    mapped = _mapped(share)
    sizes = {}
    for node in share.graph.weights:
        if node not in mapped:
            assert isinstance(node.op, Weight)
            sizes[node.op.source, node.op.rows, share.layouts[node.name]] = packed_bytes(node)
    return sum(sizes.values())


def packed_bytes(weight: Tensor) -> int:
    form = get_format(weight.dtype)
    return weight.n_values // form.block_size * form.block_bytes


def part_of(weight: PackedTensor, state: State, device: int, rows: Ranges = ()) -> PackedTensor:
    """A device's part of a packed weight, or of `rows` of it: a view where one range suffices, otherwise joined."""
    if rows and not (isinstance(state, Split) and state.axis == 0 < len(weight.shape) - 1):
        weight, rows = _joined(weight, 0, list(rows)), ()
    if state == MIRRORED:
        return weight
    assert isinstance(state, Split)
    if state.axis < len(weight.shape) - 1 or weight.format.block_size == 1:
        ranges = list(state.word.global_ranges(device))
        return _joined(weight, state.axis, _within(rows, ranges) if rows else ranges)
    blocks = state.word.factor_outer(weight.format.block_size)  # rows are cut between quant blocks
    if blocks is None:
        raise SplitError("weight", [state], f"cuts through {weight.format.name} blocks of its rows")
    return _joined(weight, state.axis, list(blocks.global_ranges(device)))


def _joined(weight: PackedTensor, axis: int, ranges: list[tuple[int, int]]) -> PackedTensor:
    """Ranges of one axis, in blocks if it is the last one."""
    unit = weight.format.block_bytes if axis == len(weight.shape) - 1 else 1
    pieces = [
        weight.data.narrow(axis, start * unit, (stop - start) * unit) for start, stop in ranges or [(0, 0)]
    ]
    return PackedTensor(pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis), weight.format)


def _within(rows: Ranges, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The source's rows at `ranges` of the sequence that `rows` spells."""
    found, position = [], 0
    for first, last in rows:
        for start, stop in ranges:
            low, high = max(start, position), min(stop, position + last - first)
            if low < high:
                found.append((first + low - position, first + high - position))
        position += last - first
    return found
