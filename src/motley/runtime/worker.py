"""`Worker`: the devices of one process, with their weights, their part of the cache and their plans."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from motley.backends import (
    Backend,
    DeviceMessages,
    DraftingJoint,
    Executable,
    HostRendezvous,
    Joint,
    Rendezvous,
    SteadyProgram,
    join,
    make_rendezvous,
)
from motley.errors import DeviceError, MotleyError
from motley.graph import Graph
from motley.kvcache.arena import Arena, CacheBatch
from motley.kvcache.sequences import BlockCopy, BlockShift
from motley.models import BatchShape
from motley.runtime.batch import Numbers, PlacedBatch
from motley.runtime.caching import CachePlan
from motley.runtime.device import DeviceRunner, record_batch
from motley.runtime.group import CollectiveKernel, Communicator, ThreadGroup
from motley.runtime.hosts.link import MeshLine, MeshLink
from motley.runtime.hosts.mesh import PeerLostError
from motley.runtime.lending import lent_weights, settle_rows
from motley.runtime.loading import Progress, load_weights, weight_bytes
from motley.runtime.rendezvous_line import RendezvousLine
from motley.runtime.splitting import ModelSplit

_FEW_TOKENS = 8  # of a batch whose collectives are too short for torch's threads
_log = logging.getLogger(__name__)

_MAX_STEPS = 64  # batch shapes whose steps are kept; the least recently used is evicted

Planes = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Step:
    """How batches of one shape run: each device's executable, and the joint executable if the backend has one."""

    executables: list[Executable]
    joint: Joint | None
    drafting: DraftingJoint | None  # the same, if it can draft


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of one device's part of the cache."""

    groups: tuple[int, ...]  # of each group, as allocated
    resident: int  # in memory at this moment

    @property
    def total(self) -> int:
        return sum(self.groups)


class Worker:
    """Runs batches on the devices of one process: all devices of the crew, or some of them.

    Results for each device are in the order of `members`, the devices' numbers in the crew.
    """

    def __init__(
        self,
        split: ModelSplit,
        backends: Mapping[int, Backend],
        cache: CachePlan,
        *,
        n_threads: int | None = None,
        progress: Progress | None = None,
        link: MeshLink | None = None,
    ) -> None:
        """`backends`: by the device's number in the crew. `n_threads`: of all devices of this process. `link`: to the
        other processes of the crew, if there are any.
        """
        self._split = split
        self.members = tuple(backends)
        self._rendezvous: Rendezvous | None = None  # with other processes
        self._link = link
        own = [backends[device] for device in self.members]
        shares = [split.share(device, BatchShape(1, 1)) for device in self.members]
        threads = split.crew.threads(n_threads, self.members)
        cores = [split.crew.devices[device].cores for device in self.members]
        for backend, count, bound in zip(own, threads, cores, strict=True):
            backend.use_threads(count, bound)
        groups = [members for members in split.crew.groups if members[0] in self.members]
        rendezvous = make_rendezvous(own, groups) if link is None else None
        numbers = [
            tuple(map(self.members.index, members)) for members in groups
        ]  # among this process's devices
        self._group = ThreadGroup(threads, cores, rendezvous, numbers)
        lines: Sequence[Communicator] = self._group.lines
        if rendezvous is not None and len({type(backend) for backend in own}) > 1:
            assert isinstance(rendezvous, HostRendezvous)
            lines = _rendezvous_lines(rendezvous, own)
        if link is not None:
            lines = [MeshLine(self._group, index, self.members, link) for index in range(len(own))]
        # Each device's own threads touch its memory first: Linux then allocates it on their NUMA node.
        weights = load_weights(split.spec, shares, own, self._group.run, progress, self.members)
        for index, device in enumerate(self.members):
            weights[index] |= lent_weights(split, device, own[index], tuple(weights[index]))
        arenas = self._group.run(lambda index: cache.arena(self.members[index], own[index].device))
        self.devices = [
            DeviceRunner(
                own[index],
                weights[index],
                arenas[index],
                build=partial(graph_of, split, device),
                collectives=CollectiveKernel(lines[index]),
                n_weight_bytes=weight_bytes(shares[index]),
            )
            for index, device in enumerate(self.members)
        ]
        self._backends, self._weights = dict(backends), dict(zip(self.members, weights, strict=True))
        self._is_single = len(own) == 1 and own[0].has_own_threads
        self._steps: OrderedDict[BatchShape, _Step] = OrderedDict()
        self.n_plans = 0  # batch shapes that were planned so far

    def settle_rows(self) -> None:
        """See `Runner.settle_rows`."""
        split = self._split
        if split.lends and split.crew.lender in self.members:
            owner = self.members.index(split.crew.lender)
            self._group.run(
                lambda index: settle_rows(split, self._backends, self._weights) if index == owner else None
            )

    def run(
        self,
        shape: BatchShape,
        batch: PlacedBatch,
        inputs: Mapping[str, Numbers],
        copies: Sequence[BlockCopy],
    ) -> list[tuple[torch.Tensor, ...]]:
        """The outputs of each device. `shape`: the batch's own, or with more rows. `copies` are made first."""
        if self._link is not None:
            self._link.mesh.begin(batch.n_best)
        step = self.prepare(shape)
        try:
            return self._run(step, batch, inputs, copies)
        except Exception as error:
            if self._split.is_lent(shape):
                self._stop_lending(error)
            aborted = () if self._rendezvous is None else self._rendezvous.aborted_error
            if isinstance(error, aborted) or isinstance(error.__cause__, aborted):
                raise PeerLostError("another process has ended or failed") from error
            raise

    def record(
        self,
        shape: BatchShape,
        batch: PlacedBatch,
        inputs: Mapping[str, Numbers],
        devices: Sequence[int],
        lends: bool | None,
    ) -> torch.Tensor:
        """See `Runner.record`."""
        chosen = [self.devices[self.members.index(device)] for device in devices]
        is_whole = len(chosen) == len(self._split.crew)
        return record_batch(chosen, shape, batch, inputs, lends=lends, is_whole=is_whole)

    def _stop_lending(self, error: Exception) -> None:
        """After a batch with borrowed weights has failed: from now on, the devices that have them compute with them."""
        _log.warning("a batch with borrowed weights failed, there will be no others: %s", error)
        for shape in [shape for shape in self._steps if self._split.is_lent(shape)]:
            del self._steps[shape]
        self._split.stop_lending()

    def _run(
        self,
        step: _Step,
        batch: PlacedBatch,
        inputs: Mapping[str, Numbers],
        copies: Sequence[BlockCopy],
    ) -> list[tuple[torch.Tensor, ...]]:
        if step.joint is not None:
            return step.joint.run([device.begin(batch, inputs, copies) for device in self.devices])
        if self._is_single and batch.shape.n_tokens <= _FEW_TOKENS:
            return [self._run_here(step.executables[0], batch, inputs, copies)]
        return self._group.run(
            lambda index: step.executables[index].run(self.devices[index].begin(batch, inputs, copies))
        )

    def _run_here(
        self,
        executable: Executable,
        batch: PlacedBatch,
        inputs: Mapping[str, Numbers],
        copies: Sequence[BlockCopy],
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of the only device, by the calling thread: waking the device's thread and being woken by it takes
        longer than Python's part of a step.
        """
        try:
            return executable.run(self.devices[0].begin(batch, inputs, copies))
        except MotleyError:
            raise
        except Exception as error:
            raise DeviceError(f"a device failed: {error}") from error

    def draft(
        self,
        shape: BatchShape,
        batch: PlacedBatch,
        inputs: Mapping[str, Numbers],
        settings: Sequence[Any],
        indexes: Sequence[int],
        n_rounds: int,
    ) -> list[list[int]] | None:
        """See `Runner.draft`."""
        drafting = self.prepare(shape).drafting
        if drafting is None:
            return None
        given = [device.begin(batch, inputs, ()) for device in self.devices]
        return drafting.draft(given, settings, indexes, n_rounds)

    def steady(
        self,
        shape: BatchShape,
        batch: PlacedBatch,
        inputs: Mapping[str, Numbers],
        settings: Sequence[Any],
    ) -> SteadyProgram | None:
        """See `Runner.steady`."""
        drafting = self.prepare(shape).drafting
        if drafting is None:
            return None
        given = [device.begin(batch, inputs, ()) for device in self.devices]
        return drafting.steady(given, len(batch.cache), settings)

    def add_rows(self, steady: SteadyProgram, shape: BatchShape) -> bool:
        """Lets a steady program run batches of a shape with more rows. False: it cannot."""
        if self._split.is_lent(shape):  # `run` knows what to do if such a batch fails
            return False
        drafting = self.prepare(shape).drafting
        return drafting is not None and drafting.add_to(steady)

    def fill(self, group: int, blocks: Iterable[int]) -> None:
        """These blocks of a cache group are about to hold something."""
        for device in self.devices:
            device.arena.fill(group, blocks)

    def prepare(self, shape: BatchShape) -> _Step:
        """The plans of all devices for a batch shape. They are kept."""
        if self._link is not None and self._link.rendezvous is not self._rendezvous:
            self._steps.clear()  # its programs do collectives at the rendezvous of a lost connection
            self._rendezvous = self._group.rendezvous = self._link.rendezvous
        step = self._steps.get(shape)
        if step is not None:
            self._steps.move_to_end(shape)
        else:
            executables = self._group.run(lambda index: self.devices[index].prepare(shape))
            is_joint = self._link is None or self._rendezvous is not None
            joint = join(executables) if is_joint else None
            drafting = cast(DraftingJoint, joint) if hasattr(joint, "draft") else None
            step = self._steps[shape] = _Step(executables, joint, drafting)
            self.n_plans += 1
            if len(self._steps) > _MAX_STEPS:
                self._steps.popitem(last=False)
        return step

    def store_random(self, batch: Sequence[CacheBatch]) -> None:
        """Fills a batch's slots with random keys and values."""
        for arena in self.arenas:
            arena.store_random(batch)

    def shift(self, shifts: Sequence[BlockShift]) -> None:
        """Moves cached K/V to earlier positions, or to other slots of the same positions, immediately."""
        if not any(shift.distance for shift in shifts):  # a few rows: not worth waking the devices' threads
            for device in self.devices:
                device.shift(shifts)
            return
        self._group.run(lambda index: self.devices[index].shift(shifts))

    def require_shift(self) -> None:
        """CacheError if this model's keys cannot move to other positions."""
        for device in self.devices:
            _ = device.key_rotator

    def give_back(self, emptied: Sequence[Sequence[int]]) -> None:
        """Releases the memory of empty blocks. `emptied`: blocks of each cache group; see Arena.give_back."""
        for device in self.devices:
            device.arena.give_back(emptied)

    def gather(self, layer: int, slots: torch.Tensor) -> list[tuple[dict[str, torch.Tensor], ...]]:
        """K and V of each device's heads of a layer; see Arena.gather."""
        return [arena.gather(layer, slots) for arena in self.arenas]

    def scatter(self, layer: int, slots: torch.Tensor, parts: Sequence[Sequence[Planes]]) -> None:
        """The reverse of `gather`."""
        for arena, planes in zip(self.arenas, parts, strict=True):
            arena.scatter(layer, slots, planes)

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
            for i, device in enumerate(self.devices)
        ]

    def cache_bytes(self) -> list[CacheBytes]:
        """The bytes of each device's part of the cache."""
        return [CacheBytes(tuple(arena.group_bytes()), arena.n_resident) for arena in self.arenas]

    @property
    def arenas(self) -> list[Arena]:
        """The arena of each device."""
        return [device.arena for device in self.devices]

    def close(self) -> None:
        self._group.close()
        self._steps.clear()
        self.devices.clear()
        self._backends.clear()
        self._weights.clear()


def _rendezvous_lines(rendezvous: HostRendezvous, backends: Sequence[Backend]) -> list[RendezvousLine]:
    """The communicators of devices of which some are native programs. One other device may have messages of its own."""
    messages: list[DeviceMessages | None] = [None for _ in backends]
    n_values = 0
    if len(backends) == 2:
        made = [None if b.has_native_collectives else b.make_messages() for b in backends]
        there = [each for each in made if each is not None]
        if len(there) == 1 and rendezvous.attach(there[0]):
            messages, n_values = made, there[0].n_values
    return [
        RendezvousLine(rendezvous, index, len(backends), backend.device, messages[index], n_values)
        for index, backend in enumerate(backends)
    ]


def graph_of(split: ModelSplit, device: int, shape: BatchShape, lends: bool | None = None) -> Graph:
    """A device's graph for a batch shape. `lends`: see `ModelSplit.split`."""
    return split.share(device, shape, lends=lends).graph
