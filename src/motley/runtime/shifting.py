"""Rotates cached keys to other positions, for context shift.

A stored key is H · R(position) · k: rotary positions first, then, for quantized types, the Hadamard rotation. Both are
linear and rotation angles add up, so a key can move by n positions without knowing k: undo H, rotate by n more
positions, redo H. Each layer's base, scaling and divisors are read from its graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from motley.backends import LoadedWeight
from motley.errors import CacheError
from motley.graph import Graph, Tensor
from motley.graph.ops import CacheStore, Hadamard, MatMul, Repeat, Reshape, Rope, cache_layer
from motley.split.collectives import Collective, Shard


@dataclass(frozen=True)
class _LayerRotation:
    """How one layer's keys rotate to other positions."""

    rope: Rope
    divisors: torch.Tensor | None
    hadamard: torch.Tensor | None  # (n, n)

    def __call__(self, keys: torch.Tensor, distance: int) -> torch.Tensor:
        positions = torch.full((len(keys),), distance, dtype=torch.int32, device=keys.device)
        divisors = [] if self.divisors is None else [self.divisors]
        return self._rotate(self.rope.reference([self._rotate(keys), positions, *divisors]))

    def _rotate(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys times the Hadamard matrix, which is its own inverse."""
        if self.hadamard is None:
            return keys
        parts = torch.unflatten(keys, -1, (-1, len(self.hadamard)))
        return torch.flatten(parts @ self.hadamard.to(keys.device), -2)


class KeyRotator:
    """Rotates the keys of all layers of a device. The rotation of each layer is read from the device's graph."""

    def __init__(self, graph: Graph, weights: Mapping[str, LoadedWeight]) -> None:
        """Raises CacheError if a layer changes its keys after rope by anything but the Hadamard rotation."""
        stores = [node for node in graph.nodes if isinstance(node.op, CacheStore)]
        self._layers = {
            cache_layer(node.inputs[0]): _layer_rotation(node.inputs[1], weights)
            for node in stores
            if node.inputs[0].shape[0]  # otherwise the device has no heads of that layer
        }

    def __call__(self, layer: int, keys: torch.Tensor, distance: int) -> torch.Tensor:
        """Keys (tokens, heads, dim) of a layer, rotated to `distance` positions later (negative: earlier)."""
        return self._layers[layer](keys, distance)


def _layer_rotation(keys: Tensor, weights: Mapping[str, LoadedWeight]) -> _LayerRotation:
    """The rotation of a layer, found by walking the graph from the stored keys back to their rope."""
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
    # The stored keys already include rope's magnitude.
    return _LayerRotation(replace(node.op, magnitude=1.0), divisors, hadamard)
