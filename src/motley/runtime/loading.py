"""From the mapped file to devices: each takes its part of each weight, straight from the map."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from motley.backends import Backend
from motley.errors import SplitError
from motley.formats import PackedTensor, get_format
from motley.gguf import ModelSpec
from motley.graph import Graph, Tensor
from motley.graph.ops import GetRows, Weight
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
        looked_up = lookup_tables(share.graph)
        weights: dict[str, PackedTensor] = {}
        memo: dict[tuple[str, State], PackedTensor] = {}  # tied weights that lie alike share memory
        for node in share.graph.weights:
            assert isinstance(node.op, Weight)
            key = node.op.source, share.layouts[node.name]
            if node in looked_up:
                weights[node.name] = spec.tensor(node.op.source)
            else:
                if key not in memo:
                    memo[key] = backend.load(part_of(spec.tensor(node.op.source), key[1], device))
                    done += memo[key].nbytes
                weights[node.name] = memo[key]
            if progress is not None:
                progress(min(done, total), total)
        loaded.append(weights)
    return loaded


def lookup_tables(graph: Graph) -> set[Tensor]:
    """Mirrored weights that are only read by row."""
    users: dict[Tensor, list[Tensor]] = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            users.setdefault(tensor, []).append(node)
    return {
        weight
        for weight in graph.weights
        if all(isinstance(user.op, GetRows) and user.inputs[0] is weight for user in users.get(weight, []))
    }


def weight_bytes(share: LocalGraph) -> int:
    """Bytes of the weights that a device loads."""
    looked_up = lookup_tables(share.graph)
    sizes = {}
    for node in share.graph.weights:
        if node not in looked_up:
            assert isinstance(node.op, Weight)
            sizes[node.op.source, share.layouts[node.name]] = packed_bytes(node)
    return sum(sizes.values())


def packed_bytes(weight: Tensor) -> int:
    form = get_format(weight.dtype)
    return weight.n_values // form.block_size * form.block_bytes


def part_of(weight: PackedTensor, state: State, device: int) -> PackedTensor:
    """A device's part of a packed weight, as views of it where one range suffices, otherwise joined."""
    if state == MIRRORED:
        return weight
    assert isinstance(state, Split)
    axis, word, unit = state.axis, state.word, 1
    if axis == len(weight.shape) - 1:  # cut between quant blocks, in bytes
        blocks = word.factor_outer(weight.format.block_size)
        if blocks is None:
            raise SplitError("weight", [state], f"cuts through {weight.format.name} blocks of its rows")
        word, unit = blocks, weight.format.block_bytes
    ranges = [(start * unit, (stop - start) * unit) for start, stop in word.global_ranges(device)] or [(0, 0)]
    pieces = [weight.data.narrow(axis, start, length) for start, length in ranges]
    data = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
    return PackedTensor(data, weight.format)
