"""Keys that move to other positions, for contexts that shift.

A stored key is H · R(position) · k: rotary positions first, then, for quantized types, the Hadamard rotation. Both are
linear and angles add up, so a key moves by n positions without k being known: undo H, rotate by n more, redo H. How a
layer's keys were made is read off its graph, so each layer has its own base, scaling and divisors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from motley.errors import CacheError
from motley.formats import PackedTensor
from motley.graph import Graph, Tensor
from motley.graph.ops import CacheStore, Hadamard, MatMul, Repeat, Reshape, Rope
from motley.models import cache_layer
from motley.split.collectives import Collective, Shard


@dataclass(frozen=True)
class _LayerTurn:
    """How one layer's keys turn."""

    rope: Rope
    divisors: torch.Tensor | None
    hadamard: torch.Tensor | None  # (n, n)

    def __call__(self, keys: torch.Tensor, distance: int) -> torch.Tensor:
        positions = torch.full((len(keys),), distance, dtype=torch.int32, device=keys.device)
        divisors = [] if self.divisors is None else [self.divisors]
        return self._rotate(self.rope.reference([self._rotate(keys), positions, *divisors]))

    def _rotate(self, keys: torch.Tensor) -> torch.Tensor:
        """By the Hadamard matrix, which is its own inverse."""
        if self.hadamard is None:
            return keys
        parts = torch.unflatten(keys, -1, (-1, len(self.hadamard)))
        return torch.flatten(parts @ self.hadamard.to(keys.device), -2)


class KeyTurner:
    """Moves keys of all layers that a device has, as its graph says."""

    def __init__(self, graph: Graph, weights: Mapping[str, PackedTensor]) -> None:
        """CacheError if a layer does something else to its keys after their rope."""
        stores = [node for node in graph.nodes if isinstance(node.op, CacheStore)]
        self._layers = {
            cache_layer(node.inputs[0].name): _layer_turn(node.inputs[1], weights)
            for node in stores
            if node.inputs[0].shape[0]  # else the device has no heads of that layer
        }

    def __call__(self, layer: int, keys: torch.Tensor, distance: int) -> torch.Tensor:
        """Keys (tokens, heads, dim) of a layer, `distance` positions later (or earlier, if it is negative)."""
        return self._layers[layer](keys, distance)


def _layer_turn(keys: Tensor, weights: Mapping[str, PackedTensor]) -> _LayerTurn:
    """Walk back from the keys that are stored to their rope."""
    hadamard = None
    node = keys
    while not isinstance(node.op, Rope):
        if isinstance(node.op, MatMul) and isinstance(node.inputs[1].op, Hadamard):
            hadamard = node.inputs[1].op.reference([])
        elif not (node.inputs and isinstance(node.op, Reshape | Repeat | Shard | Collective)):
            raise CacheError(
                f"the context cannot shift: {node.name or keys.name} changes keys after their positions "
                f"({node.op.name})",
                hint="run without context shift",
            )
        node = node.inputs[0]
    divisors = weights[node.inputs[2].name].unpack() if len(node.inputs) == 3 else None
    # The stored keys have their magnitude already.
    return _LayerTurn(replace(node.op, magnitude=1.0), divisors, hadamard)
