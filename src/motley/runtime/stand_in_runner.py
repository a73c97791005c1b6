"""A runner without weights, which records the kernels of a crew's GPUs while the weights are still being read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from motley.backends import Backend, DeviceMessages
from motley.graph import Graph, Shape, Tensor
from motley.models import BatchShape
from motley.runtime.batch import Numbers, PlacedBatch
from motley.runtime.caching import CachePlan
from motley.runtime.device import DeviceRunner, record_batch
from motley.runtime.group import CollectiveKernel, PartSizes
from motley.runtime.lending import lent_stand_ins
from motley.runtime.loading import stand_in_weights
from motley.runtime.runner import padded
from motley.runtime.splitting import ModelSplit
from motley.runtime.worker import graph_of

_FEW_BLOCKS = 16  # of a cache that is never written to


class StandInRunner:
    """Records kernels of the crew's devices that compile them, without weights, and without the other devices."""

    def __init__(self, split: ModelSplit, backends: Sequence[Backend], cache: CachePlan) -> None:
        """`backends`: of all devices; stand-ins (Backend.stand_in) of those that compile kernels."""
        self._backends = list(backends)
        cache = _small(cache)
        self._devices = {
            device: _stand_in_device(split, device, self._backends, cache)
            for device, backend in enumerate(backends)
            if backend.compiles_kernels
        }

    def record(self, batch: PlacedBatch, devices: Sequence[int], lends: bool | None) -> torch.Tensor:
        """See `Runner.record`."""
        n_tokens = batch.shape.n_tokens
        inputs: Mapping[str, Numbers] = {"tokens": torch.zeros(n_tokens, dtype=torch.int32), **batch.inputs}
        shape, is_whole = padded(batch.shape, self._backends), len(devices) == len(self._backends)
        chosen = [self._devices[device] for device in devices]
        return record_batch(chosen, shape, batch, inputs, lends=lends, is_whole=is_whole)

    def close(self) -> None:
        self._devices.clear()
        self._backends.clear()


def stand_in_runner(
    split: ModelSplit, backends: Sequence[Backend], cache: CachePlan, max_bytes: Sequence[int | None]
) -> StandInRunner | None:
    """A runner whose batches may only be recorded; None: a backend has no stand-in, or none compiles kernels.
    `max_bytes`: of each device's memory that it may take beside its part of the activations.
    """
    twins = [
        backend.stand_in(n_bytes) if backend.compiles_kernels else backend
        for backend, n_bytes in zip(backends, max_bytes, strict=True)
    ]
    there = [twin for twin in twins if twin is not None]
    if len(there) < len(twins) or not any(twin.compiles_kernels for twin in there):
        return None
    return StandInRunner(split, there, cache)


class _Line:
    """The communicator (`group.Communicator`) of a device whose peers do not run: its kernels are only recorded."""

    reader = 0

    def __init__(self, device: int, n_devices: int, messages: DeviceMessages | None) -> None:
        self.device, self.n_devices = device, n_devices
        self.messages = messages
        self.n_message_values = 0 if messages is None else messages.n_values

    def exchange(self, part: torch.Tensor | None, sizes: PartSizes) -> Sequence[torch.Tensor | None]:
        raise AssertionError("there are no peers")

    def send(self, tensor: torch.Tensor, target: int) -> None:
        raise AssertionError("there are no peers")

    def receive(self, source: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("there are no peers")


def _stand_in_device(
    split: ModelSplit, device: int, backends: Sequence[Backend], cache: CachePlan
) -> DeviceRunner:
    backend = backends[device]
    weights = stand_in_weights(split.share(device, BatchShape(1, 1)), backend)
    weights |= lent_stand_ins(split, device, backend, tuple(weights))
    # Beside one native program, the device has messages of its own (`worker._rendezvous_lines`).
    has_messages = len(backends) == 2 and backends[1 - device].has_native_collectives
    line = _Line(device, len(backends), backend.make_messages() if has_messages else None)
    return DeviceRunner(
        backend,
        weights,
        cache.arena(device, backend.device),
        build=partial(graph_of, split, device),
        collectives=CollectiveKernel(line),
        n_weight_bytes=0,
    )


def layers_to_record(split: ModelSplit, devices: Sequence[int] = (0,)) -> int:
    """How many of the first layers have all kernels that these devices have of the model: those after them repeat them.
    0: all are needed.
    """
    lendings = (False, True) if split.crew.borrower in devices else (None,)
    n_rows = max(split.crew.min_lent_rows, 1)

    def kinds(n_layers: int) -> list[set[Hashable]]:
        shape = BatchShape(n_rows, 1, n_layers=n_layers)
        return [_kinds(split.share(d, shape, lends=lends).graph) for d in devices for lends in lendings]

    whole, n_layers = kinds(0), 1
    while n_layers < split.params.n_layers:
        if all(all_of <= found for all_of, found in zip(whole, kinds(n_layers), strict=True)):
            return n_layers
        n_layers *= 2
    return 0


def _kinds(graph: Graph) -> set[Hashable]:
    """The nodes of a graph as far as their kernels depend on it: each with its inputs and with the nodes that read it,
    which may become one stage with it.
    """
    readers: dict[Tensor, Counter[Hashable]] = {}
    for node in graph.nodes:
        for tensor in dict.fromkeys(node.inputs):
            readers.setdefault(tensor, Counter())[_kind(node)] += 1
    return {
        (_kind(node), frozenset(readers.get(node, Counter()).items())) for node in graph.nodes if node.inputs
    }


def _kind(node: Tensor) -> Hashable:
    """An op with the shapes and types of its inputs; of weights and other inputs of the graph, only these."""
    inputs = tuple((each.shape, each.dtype, bool(each.inputs)) for each in node.inputs)
    return (node.op, node.shape, node.dtype, inputs)


def _small(cache: CachePlan) -> CachePlan:
    """The same layout with a few blocks."""
    groups = tuple(replace(group, n_blocks=min(group.n_blocks, _FEW_BLOCKS)) for group in cache.groups)
    states = cache.states and replace(cache.states, n_slots=2, n_rings=2)
    return replace(cache, config=replace(cache.config, demand_paged=False), groups=groups, states=states)
