"""From the mapped file to devices: each takes its part of each weight, straight from the map."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence

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

Progress = Callable[[int, int], None]
"""Called while loading with (bytes done, bytes in all)."""


def load_weights(
    spec: ModelSpec,
    shares: Sequence[LocalGraph],
    backends: Sequence[Backend],
    progress: Progress | None = None,
) -> list[dict[str, PackedTensor]]:
    """Each device's weights by their name in its graph. What is only looked up by row stays mapped."""
    total, done = sum(weight_bytes(share) for share in shares), 0
    loaded: list[dict[str, PackedTensor]] = []
    for device, (share, backend) in enumerate(zip(shares, backends, strict=True)):
        mapped = _mapped(share)
        weights: dict[str, PackedTensor] = {}
        memo: dict[tuple[str, Ranges, State], PackedTensor] = {}  # tied weights that lie alike share memory
        for node in share.graph.weights:
            assert isinstance(node.op, Weight)
            key = node.op.source, node.op.rows, share.layouts[node.name]
            if node in mapped:
                weights[node.name] = spec.tensor(node.op.source)
            else:
                if key not in memo:
                    memo[key] = backend.load(
                        part_of(spec.tensor(node.op.source), key[2], device, node.op.rows)
                    )
                    done += memo[key].nbytes
                    _forget(spec, node.op.source)
                weights[node.name] = memo[key]
            if progress is not None:
                progress(min(done, total), total)
        loaded.append(weights)
    return loaded


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
