"""Loads weights from the mapped file: each device copies its part of each weight directly from the mapping."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from motley.backends import Backend, LoadedWeight
from motley.errors import SplitError
from motley.formats import PackedTensor, get_format
from motley.gguf import ModelSpec
from motley.graph import Graph, Tensor
from motley.graph.ops import GetRows, Weight
from motley.models.builder import Ranges
from motley.ownership import MIRRORED, Split, State
from motley.page_cache import FileRange, read_ahead_in_thread
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
    numbers: Sequence[int] | None = None,
) -> list[dict[str, LoadedWeight]]:
    """Each device's weights by their name in its graph. Tables that are only looked up by row stay mapped.

    `on_all(work)` runs work(index) for each device and waits. It is called for some megabytes at a time, so that the
    caller's thread can call `progress` and receive an interrupt in between. `numbers`: of the devices in the crew, if
    these are not all of them.
    """
    loaders = [
        _Loader(spec, share, backend, device)
        for device, share, backend in zip(numbers or range(len(shares)), shares, backends, strict=True)
    ]
    for share, backend in zip(shares, backends, strict=True):
        backend.expect_weights(weight_bytes(share))
    total = sum(map(weight_bytes, shares))
    while not all(loader.is_done for loader in loaders):
        on_all(lambda index: loaders[index].load_some())
        if progress is not None:
            progress(min(sum(loader.n_bytes for loader in loaders), total), total)
    on_all(lambda index: backends[index].finish_loading())
    if kept := [each for loader in loaders for each in loader.kept]:
        read_ahead_in_thread(kept)
    return [loader.weights for loader in loaders]


def stand_in_weights(share: LocalGraph, backend: Backend) -> dict[str, LoadedWeight]:
    """A device's weights without contents, by name; no file is read. `backend`: see Backend.stand_in."""
    largest_first = sorted(share.graph.weights, key=packed_bytes)[::-1]
    return {node.name: backend.weight_like(node) for node in largest_first}


class _Loader:
    """Loads one device's weights, some at a time."""

    def __init__(self, spec: ModelSpec, share: LocalGraph, backend: Backend, device: int) -> None:
        self.weights: dict[str, LoadedWeight] = {}
        self.n_bytes = 0
        self.kept: list[FileRange] = []  # tensors that are used where they are mapped
        self._spec, self._share, self._backend, self._device = spec, share, backend, device
        self._mapped = _mapped(share)
        # The largest last, because tensors are taken from the end: while a tensor is copied, its pages of the file are
        # resident beside the copy, so the peak is lowest if the largest tensors are copied first.
        self._waiting = sorted(share.graph.weights, key=packed_bytes)
        # Tied weights with the same state share memory.
        self._memo: dict[tuple[object, ...], LoadedWeight] = {}

    @property
    def is_done(self) -> bool:
        return not self._waiting

    def load_some(self) -> None:
        enough = self.n_bytes + _AT_A_TIME
        while self._waiting and self.n_bytes < enough:
            node = self._waiting.pop()
            assert isinstance(node.op, Weight)
            self.weights[node.name] = self._get(node, node.op)

    def _get(self, node: Tensor, op: Weight) -> LoadedWeight:
        if node in self._mapped:
            return self._spec.tensor(op.source)
        state = self._share.layouts[node.name]
        key = *op.contents, state
        if key not in self._memo:
            whole = _with_axes(self._spec.tensor(op.source), len(op.size))
            within = whole if op.middle is None else _joined(whole, 1, [op.middle])
            self._memo[key] = loaded = self._backend.load(part_of(within, state, self._device, op.rows))
            self.n_bytes += packed_bytes(node)
            if isinstance(loaded, PackedTensor) and _share_memory(loaded.data, whole.data):
                self.kept.append(_range_of(self._spec, op.source))
            else:
                _release_source(self._spec, op.source)
        return self._memo[key]


def _with_axes(weight: PackedTensor, n_axes: int) -> PackedTensor:
    """The weight; a vector that is used as a matrix becomes its only row."""
    is_row = len(weight.shape) == 1 and n_axes == 2
    return PackedTensor(weight.data[None], weight.format) if is_row else weight


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _release_source(spec: ModelSpec, name: str) -> None:
    """Releases a copied tensor's pages of the mapped file; reading the tensor maps them again."""
    if sys.platform == "linux":
        _advise(spec, name, mmap.MADV_DONTNEED)


def _advise(spec: ModelSpec, name: str, advice: int) -> None:
    """Gives `madvise` advice for the pages that are completely within a tensor."""
    _, start, stop = _range_of(spec, name)
    page = mmap.PAGESIZE
    start, stop = -(-start // page) * page, stop // page * page
    if start < stop:
        spec.parts[spec.tensors[name].part].data.madvise(advice, start, stop - start)


def _range_of(spec: ModelSpec, name: str) -> FileRange:
    info = spec.tensors[name]
    return FileRange(str(spec.parts[info.part].path), info.offset, info.offset + info.nbytes)


def lookup_tables(graph: Graph) -> set[Tensor]:
    """Weights that are only read by row."""
    users: dict[Tensor, list[Tensor]] = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            users.setdefault(tensor, []).append(node)
    return {
        weight
        for weight in graph.weights
        if weight in users  # otherwise only other batches read it
        and all(isinstance(user.op, GetRows) and user.inputs[0] is weight for user in users[weight])
    }


def _mapped(share: LocalGraph) -> set[Tensor]:
    """The weights that a device reads from the mapped file: whole tables that are looked up by row."""
    return {t for t in lookup_tables(share.graph) if share.layouts[t.name] == MIRRORED}


def weight_bytes(share: LocalGraph) -> int:
    """Bytes of the weights that a device loads."""
    mapped = _mapped(share)
    sizes: dict[tuple[object, ...], int] = {}
    for node in share.graph.weights:
        if node not in mapped:
            assert isinstance(node.op, Weight)
            sizes[*node.op.contents, share.layouts[node.name]] = packed_bytes(node)
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
    """Ranges of one axis, concatenated; for the last axis, ranges are in blocks."""
    unit = weight.format.block_bytes if axis == len(weight.shape) - 1 else 1
    pieces = [
        weight.data.narrow(axis, start * unit, (stop - start) * unit) for start, stop in ranges or [(0, 0)]
    ]
    return PackedTensor(pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis), weight.format)


def _within(rows: Ranges, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges of the source's rows at positions `ranges` of the sequence of rows given by `rows`."""
    found, position = [], 0
    for first, last in rows:
        for start, stop in ranges:
            low, high = max(start, position), min(stop, position + last - first)
            if low < high:
                found.append((first + low - position, first + high - position))
        position += last - first
    return found
