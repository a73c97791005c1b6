"""`DeviceRunner`: one device's weights, its part of the cache, and its plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import torch

from motley.backends import Backend, BatchInputs, Executable, LoadedWeight, join
from motley.graph import CACHE, RECURRENT, Graph
from motley.graph.ops import cache_layer
from motley.kvcache.arena import Arena, ArenaLayer
from motley.kvcache.groups import BlockCopy, BlockShift
from motley.kvcache.state_arena import StatePlanes
from motley.models import BatchShape
from motley.plan import DevicePlan
from motley.runtime.batch import Numbers, PlacedBatch
from motley.runtime.group import CollectiveKernel
from motley.runtime.shifting import KeyRotator


class Build(Protocol):
    def __call__(self, shape: BatchShape, lends: bool | None = None) -> Graph:
        """A device's graph for a batch shape. `lends`: see `ModelSplit.split`."""
        ...


class DeviceRunner:
    """Runs batches on one device. `build` gives this device's graph for a batch shape."""

    def __init__(
        self,
        backend: Backend,
        weights: Mapping[str, LoadedWeight],
        arena: Arena,
        build: Build,
        collectives: CollectiveKernel,
        n_weight_bytes: int,
    ) -> None:
        self._backend = backend
        self._collectives = collectives
        self._weights = weights
        self._n_weight_bytes = n_weight_bytes
        self._build = build
        self.arena = arena

    def prepare(self, shape: BatchShape, lends: bool | None = None) -> Executable:
        """The executable for batches of a shape."""
        graph = self._build(shape, lends)
        plan = DevicePlan.of(graph, (self._collectives.of(graph), *self._backend.kernels))
        return self._backend.prepare(plan, self._weights)

    def begin(
        self, batch: PlacedBatch, inputs: Mapping[str, Numbers], copies: Sequence[BlockCopy]
    ) -> BatchInputs:
        """The arguments of an executable for a batch: its inputs, and each cache layer with the batch's block tables.

        Also performs the block copies.
        """
        self.arena.prepare(batch.cache, copies)
        return BatchInputs(inputs, self._layers, batch.cache)

    def shift(self, shifts: Sequence[BlockShift]) -> None:
        """Move cached K/V to earlier positions."""
        self.arena.shift(shifts, lambda *moved: self.key_rotator(*moved))  # only found if keys are rotated

    @cached_property
    def _layers(self) -> dict[str, ArenaLayer | StatePlanes]:
        """Cache layers and states by the name of the graph's input; the same for all batches."""
        found: dict[str, ArenaLayer | StatePlanes] = {}
        for node in self._build(BatchShape(1, 1)).inputs:
            if node.dtype == CACHE:
                found[node.name] = self.arena.layer(cache_layer(node))
            elif node.dtype == RECURRENT:
                found[node.name] = self.arena.state(node.name)
        return found

    @cached_property
    def key_rotator(self) -> KeyRotator:
        """Rotates cached keys to other positions. CacheError if this model's keys cannot be rotated."""
        return KeyRotator(self._build(BatchShape(1, 1)), self._weights)

    @property
    def n_weight_bytes(self) -> int:
        """Bytes of the loaded weights, without tables that stay mapped."""
        return self._n_weight_bytes


def record_batch(
    runners: Sequence[DeviceRunner],
    shape: BatchShape,
    batch: PlacedBatch,
    inputs: Mapping[str, Numbers],
    *,
    lends: bool | None,
    is_whole: bool,
) -> torch.Tensor:
    """What the first device takes for a batch's logits, while kernels are recorded and not launched. Goes through the
    kernels of some of a crew's devices, without the others. Plans are not kept.

    `lends`: see `ModelSplit.split`. `is_whole`: these are all devices of the crew, which may have a joint run.
    """
    executables = [runner.prepare(shape, lends) for runner in runners]
    given = [runner.begin(batch, inputs, ()) for runner in runners]
    joint = join(executables) if is_whole else None
    if joint is not None:
        return joint.run(given)[0][0]
    outputs = [executable.record(own) for executable, own in zip(executables, given, strict=True)]
    return outputs[0][0]
