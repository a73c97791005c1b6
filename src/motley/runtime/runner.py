"""`Runner`: model + cache + batch → logits, on a crew of devices. One path for one device and for many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from motley.backends import Backend, Executable, Joint, join
from motley.graph import Graph
from motley.kvcache.arena import Arena
from motley.kvcache.batching import Extent, group_batches
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import BlockCopy, BlockShift
from motley.models import BatchShape
from motley.runtime.batch import Batch, PlacedBatch
from motley.runtime.caching import CachePlan
from motley.runtime.device import DeviceRunner
from motley.runtime.group import CollectiveKernel, ThreadGroup
from motley.runtime.loading import Progress, load_weights, weight_bytes
from motley.runtime.splitting import ModelSplit

_MAX_STEPS = 64  # batch shapes kept ready; the least recently used goes first


@dataclass(frozen=True)
class _Step:
    """How batches of one shape run: each device's executable, and all of them at once where there is a way."""

    executables: list[Executable]
    joint: Joint | None


class Runner:
    """A loaded model."""

    def __init__(
        self,
        split: ModelSplit,
        backends: Sequence[Backend],
        cache: CachePlan,
        *,
        n_threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        n_devices = len(split.crew)
        self._backends = list(backends)
        shares = [split.share(device, BatchShape(1, 1)) for device in range(n_devices)]
        is_native = all(backend.device.type == "cpu" for backend in backends)
        threads, cores = split.crew.threads(n_threads), [device.cores for device in split.crew.devices]
        for backend, count, own in zip(backends, threads, cores, strict=True):
            backend.use_threads(count, own)
        self._group = ThreadGroup(threads, cores, is_native=is_native)
        # Each device's own threads touch its memory first, which puts it close to their cores.
        weights = load_weights(split.spec, shares, backends, self._group.run, progress)
        arenas = self._group.run(lambda device: cache.arena(device, backends[device].device))
        self._devices = [
            DeviceRunner(
                backends[device],
                weights[device],
                arenas[device],
                build=partial(_graph_of, split, device),
                collectives=CollectiveKernel(self._group.lines[device]),
                n_weight_bytes=weight_bytes(shares[device]),
            )
            for device in range(n_devices)
        ]
        self._steps: OrderedDict[BatchShape, _Step] = OrderedDict()

    def place(self, batch: Batch, manager: CacheManager) -> PlacedBatch:
        """Where a batch's tokens go and what they see. Their slots have been reserved, and stay as they are until it
        has run.
        """
        extents = [Extent(c.sequence, c.start, c.n_tokens) for c in batch.chunks]
        inputs = {"positions": batch.positions(), "output_rows": batch.output_rows()}
        return PlacedBatch(
            BatchShape(batch.n_tokens, batch.n_outputs),
            {name: _int32(numbers) for name, numbers in inputs.items()},
            tuple(group_batches(manager, extents)),
        )

    def run(self, batch: PlacedBatch, tokens: Sequence[int], copies: Sequence[BlockCopy]) -> torch.Tensor:
        """Logits (outputs, vocab) of the rows that want them, on their device, until the next run.

        `tokens`: of all chunks, one after the other. `copies` are made first. A GPU may still be at work.
        """
        assert len(tokens) == batch.shape.n_tokens, (len(tokens), batch.shape)
        inputs = {"tokens": _int32(tokens), **batch.inputs}
        step = self._step(self._padded(batch.shape))
        if step.joint is not None:
            outputs = step.joint.run([device.begin(batch, inputs, copies) for device in self._devices])
        else:
            outputs = self._group.run(
                lambda device: step.executables[device].run(
                    self._devices[device].begin(batch, inputs, copies)
                )
            )
        return outputs[0][0][: batch.shape.n_outputs]

    def _padded(self, shape: BatchShape) -> BatchShape:
        """The shape that plans are made for: rows as the devices like them, where they like them alike."""
        n_tokens, n_outputs = (
            {b.bucket(n) for b in self._backends} for n in (shape.n_tokens, shape.n_outputs)
        )
        return BatchShape(*n_tokens, *n_outputs) if len(n_tokens) == len(n_outputs) == 1 else shape

    def _step(self, shape: BatchShape) -> _Step:
        if shape in self._steps:
            self._steps.move_to_end(shape)
        else:
            executables = self._group.run(lambda device: self._devices[device].prepare(shape))
            self._steps[shape] = _Step(executables, join(executables))
            if len(self._steps) > _MAX_STEPS:
                self._steps.popitem(last=False)
        return self._steps[shape]

    def store_random(self, manager: CacheManager, sequence: int, n_tokens: int) -> None:
        """Fill the next slots of a sequence, which have been reserved, with random keys and values."""
        batch = group_batches(manager, [Extent(sequence, manager.n_tokens(sequence), n_tokens)])
        for arena in self.arenas:
            arena.begin(batch, [])
            arena.store_random()

    def shift(self, shifts: Sequence[BlockShift]) -> None:
        """Move cached K/V to earlier positions, at once."""
        self._group.run(lambda device: self._devices[device].shift(shifts))

    def require_shift(self) -> None:
        """CacheError if this model's keys cannot move to other positions."""
        for device in self._devices:
            _ = device.key_turner

    def give_back(self, emptied: Sequence[Sequence[int]]) -> None:
        """Blocks of each cache group that hold nothing any more; see Arena.give_back."""
        for device in self._devices:
            device.arena.give_back(emptied)

    def memory(self) -> list[dict[str, int]]:
        """Bytes by purpose, for each device."""
        return [
            {
                "weights": device.n_weight_bytes,
                "kv_cache": device.arena.n_bytes,
                "activations": max(
                    (s.executables[i].n_activation_bytes for s in self._steps.values()), default=0
                ),
            }
            for i, device in enumerate(self._devices)
        ]

    @property
    def arenas(self) -> list[Arena]:
        """Of each device, for those who count bytes."""
        return [device.arena for device in self._devices]

    def close(self) -> None:
        self._group.close()
        self._steps.clear()
        self._devices.clear()
        self._backends.clear()


def _graph_of(split: ModelSplit, device: int, shape: BatchShape) -> Graph:
    return split.share(device, shape).graph


def _int32(numbers: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, np.int32))
