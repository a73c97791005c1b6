"""`DeviceRunner`: one device's weights, its part of the cache, and its plans by batch shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from motley.backends import Backend, Executable
from motley.formats import PackedTensor
from motley.graph import CACHE, Graph
from motley.kvcache.arena import Arena, GroupBatch
from motley.kvcache.sequences import BlockCopy, BlockShift
from motley.models import BatchShape
from motley.plan import DevicePlan, Kernel
from motley.runtime.shifting import KeyTurner

_MAX_PLANS = 64  # batch shapes kept ready; the least recently used goes first


@dataclass(frozen=True)
class DeviceBatch:
    """A batch as devices see it: shape, inputs by name, and cache addresses per group."""

    shape: BatchShape
    inputs: Mapping[str, torch.Tensor]
    cache: tuple[GroupBatch, ...]
    copies: Sequence[BlockCopy]  # to be made first


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
        self._plans: OrderedDict[BatchShape, tuple[Graph, Executable]] = OrderedDict()
        self.arena = arena

    def run(self, batch: DeviceBatch) -> torch.Tensor:
        graph, executable = self._plan(batch.shape)
        self.arena.begin(batch.cache, batch.copies)
        inputs = {
            node.name: self.arena.layer(int(node.name.removeprefix("cache.")), batch.cache)
            if node.dtype == CACHE
            else batch.inputs[node.name]
            for node in graph.inputs
        }
        (logits,) = executable.run(inputs)
        return logits

    def shift(self, shifts: Sequence[BlockShift]) -> None:
        """Move cached K/V to earlier positions."""
        self.arena.shift(shifts, self.key_turner)

    @cached_property
    def key_turner(self) -> KeyTurner:
        """CacheError if this model's keys cannot move."""
        return KeyTurner(self._build(BatchShape(1, 1)), self._weights)

    @property
    def n_weight_bytes(self) -> int:
        """Of what was loaded; tables that stay mapped do not count."""
        return self._n_weight_bytes

    @property
    def n_activation_bytes(self) -> int:
        """Of the largest plan; plans run one at a time."""
        return max((executable.n_activation_bytes for _, executable in self._plans.values()), default=0)

    def _plan(self, shape: BatchShape) -> tuple[Graph, Executable]:
        if shape in self._plans:
            self._plans.move_to_end(shape)
        else:
            graph = self._build(shape)
            plan = DevicePlan.of(graph, self._kernels)
            self._plans[shape] = graph, self._backend.prepare(plan, self._weights)
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return self._plans[shape]
