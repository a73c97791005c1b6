"""`DeviceRunner`: one device's weights, its part of the cache, and how its plans are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from motley.backends import Backend, Executable
from motley.formats import PackedTensor
from motley.graph import CACHE, Graph
from motley.kvcache.arena import Arena
from motley.kvcache.sequences import BlockCopy, BlockShift
from motley.models import BatchShape, cache_layer
from motley.plan import DevicePlan, Kernel
from motley.runtime.batch import PlacedBatch
from motley.runtime.shifting import KeyTurner


class DeviceRunner:
    """Runs batches on one device. `build` gives this device's graph for a batch shape."""

    def __init__(
        self,
        backend: Backend,
        weights: Mapping[str, PackedTensor],
        arena: Arena,
        build: Callable[[BatchShape], Graph],
        collectives: Kernel,
        n_weight_bytes: int,
    ) -> None:
        self._backend = backend
        self._kernels = (collectives, *backend.kernels)
        self._weights = weights
        self._n_weight_bytes = n_weight_bytes
        self._build = build
        self.arena = arena

    def prepare(self, shape: BatchShape) -> Executable:
        """What runs batches of a shape."""
        plan = DevicePlan.of(self._build(shape), self._kernels)
        return self._backend.prepare(plan, self._weights)

    def begin(
        self, batch: PlacedBatch, inputs: Mapping[str, torch.Tensor], copies: Sequence[BlockCopy]
    ) -> dict[str, Any]:
        """What an executable takes for a batch: its inputs and the cache, in which copies are made now."""
        self.arena.begin(batch.cache, copies)
        return {**self._layers, **inputs}

    def shift(self, shifts: Sequence[BlockShift]) -> None:
        """Move cached K/V to earlier positions."""
        self.arena.shift(shifts, self.key_turner)

    @cached_property
    def _layers(self) -> dict[str, Any]:
        """Cache layers by the name of the graph's input; the same for all batches."""
        names = [node.name for node in self._build(BatchShape(1, 1)).inputs if node.dtype == CACHE]
        return {name: self.arena.layer(cache_layer(name)) for name in names}

    @cached_property
    def key_turner(self) -> KeyTurner:
        """CacheError if this model's keys cannot move."""
        return KeyTurner(self._build(BatchShape(1, 1)), self._weights)

    @property
    def n_weight_bytes(self) -> int:
        """Of what was loaded; tables that stay mapped do not count."""
        return self._n_weight_bytes
