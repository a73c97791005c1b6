"""`Runner`: model + cache + batch → logits, on a crew of devices. One path for one device and for many."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from motley.backends import Backend
from motley.errors import CacheError, MotleyError
from motley.kvcache.batching import Extent, group_batches
from motley.kvcache.groups import BlockCopy, BlockShift
from motley.kvcache.manager import CacheManager
from motley.models import HIDDEN, N_EXPERT_USED, BatchShape, ExpertParams
from motley.runtime.batch import Batch, Numbers, PlacedBatch
from motley.runtime.caching import CachePlan
from motley.runtime.hosts.workers import Hosts
from motley.runtime.loading import Progress
from motley.runtime.splitting import ModelSplit
from motley.runtime.steady import SteadyRun
from motley.runtime.worker import CacheBytes, Planes, Worker

T = TypeVar("T")
_MAX_SHAPES = 1024  # that are kept

_batch_shape = lru_cache(_MAX_SHAPES)(BatchShape)


class Runner:
    """Runs batches on a loaded model."""

    def __init__(
        self,
        split: ModelSplit,
        backends: Sequence[Backend],
        cache: CachePlan,
        *,
        n_threads: int | None = None,
        progress: Progress | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        """`backends`: of all devices. `hosts`: the workers of devices in other processes, already opened."""
        self._experts = split.params.experts
        self._n_vocab = split.params.n_vocab
        self._is_demand_paged = cache.config.demand_paged
        self._has_states = cache.states is not None
        self.n_runs = 0  # number of runs so far: logits are valid until it changes
        self.hidden: torch.Tensor | None = None  # (tokens, embd) of the latest batch that keeps them
        self._backends = list(backends)
        self._hosts = hosts
        self._padded_shapes: dict[BatchShape, BatchShape] = {}
        gpus = {backend.device for backend in backends}
        is_one_gpu = len(gpus) == 1 and all(gpu.type == "cuda" for gpu in gpus)
        self._can_chain = is_one_gpu and not self._is_demand_paged and hosts is None
        own = {device: backends[device] for device in split.crew.members(0)}
        self._takes_lists = all(backend.takes_lists for backend in own.values())
        link = None if hosts is None else hosts.link
        self.local = Worker(
            split,
            own,
            cache,
            n_threads=n_threads,
            progress=progress,
            link=link,
        )
        self._owners = split.crew.owners
        if hosts is not None:
            try:
                hosts.connect(progress)
            except BaseException:
                self.local.close()
                raise

    def place(self, batch: Batch, manager: CacheManager, n_rounds: int = 1) -> PlacedBatch:
        """The batch with its slots, block tables and other inputs. Its slots must be reserved before, and must not
        change until the batch has run. `n_rounds`: see `draft`.
        """
        extents = [Extent(c.sequence, c.start, c.n_tokens, c.seen) for c in batch.chunks]
        inputs = {"positions": batch.positions(), "output_rows": batch.output_rows()}
        max_experts = 0
        if self._experts is not None:
            inputs[N_EXPERT_USED] = batch.n_experts(self._experts.n_used)
            max_experts = _max_experts(max(inputs[N_EXPERT_USED], default=0), self._experts)
        return PlacedBatch(
            _batch_shape(
                batch.n_tokens,
                batch.n_outputs,
                batch.n_layers,
                max_experts,
                batch.wants_hidden,
                batch.keeps_hidden,
            ),
            {name: self._packed(numbers) for name, numbers in inputs.items()},
            tuple(group_batches(manager, extents, n_ahead=n_rounds - 1, as_arrays=not self._takes_lists)),
            0 if batch.wants_hidden or batch.keeps_hidden or batch.n_best > self._n_vocab else batch.n_best,
        )

    def run(
        self,
        batch: PlacedBatch,
        tokens: list[int] | torch.Tensor,
        copies: Sequence[BlockCopy],
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (outputs, vocab) of the batch's output rows, on their device, or hidden states (outputs, embd) if it
        wants them. Valid until the next run.

        `tokens`: of all chunks, concatenated; if `can_chain`, an int32 tensor on the device is allowed too, even before
        the device has computed it. `copies` are made first. A GPU may still be computing when this returns.
        `hidden`: an input of multi-token prediction layers. If the batch keeps hidden states, `self.hidden` has them.
        """
        assert len(tokens) == batch.shape.n_tokens, (len(tokens), batch.shape)
        self.n_runs += 1
        given = tokens if isinstance(tokens, torch.Tensor) else self._packed(tokens)
        inputs: dict[str, Numbers] = {"tokens": given, **batch.inputs}
        if hidden is not None:
            inputs[HIDDEN] = hidden
        shape = self.padded(batch.shape)
        if self._hosts is None:
            outputs = self.local.run(shape, batch, inputs, copies)
        else:
            with self._hosts.guarded():
                self._hosts.run(shape, batch, inputs, copies)
                outputs = self.local.run(shape, batch, inputs, copies)
        self.hidden = outputs[0][1][: batch.shape.n_tokens] if batch.shape.keeps_hidden else None
        logits, n_outputs = outputs[0][0], batch.shape.n_outputs
        return logits if shape.n_outputs == n_outputs else logits[:n_outputs]

    def record(self, batch: PlacedBatch, devices: Sequence[int], lends: bool | None) -> torch.Tensor:
        """Goes through the kernels of a batch on some devices of this process, which are recorded and not launched. The
        others do not compute. Returns what the first of `devices` takes for the logits.

        `lends`: whether a device lends its weights for the batch; None: if it has enough rows. Workers of other
        processes run the batch: they compile kernels when they launch them.
        """
        if self._hosts is not None:
            return self.run(batch, [0] * batch.shape.n_tokens, ())
        inputs = {"tokens": self._packed([0] * batch.shape.n_tokens), **batch.inputs}
        return self.local.record(self.padded(batch.shape), batch, inputs, devices, lends)

    def draft(
        self,
        batch: PlacedBatch,
        tokens: list[int],
        settings: Sequence[Any],
        indexes: Sequence[int],
        n_rounds: int,
    ) -> list[list[int]] | None:
        """Tokens of `n_rounds` rounds for each sequence of a batch with one token each, in one native call: the tokens
        of a round are the inputs of the next. None: this runner has no such call.

        The batch must be placed for `n_rounds`. `settings`, `indexes`: of each row, as for `choose_rows`. If a row has
        no token (see there), its round is the last.
        """
        if not self._takes_lists or self._has_states or self._is_demand_paged or self._hosts is not None:
            return None
        inputs: dict[str, Numbers] = {"tokens": tokens, **batch.inputs}
        rounds = self.local.draft(self.padded(batch.shape), batch, inputs, settings, indexes, n_rounds)
        self.n_runs += len(rounds or ())
        return rounds

    def steady(self, batch: PlacedBatch, settings: Sequence[Any]) -> SteadyRun | None:
        """A way to run batches like this one, of one token for each sequence, again and again, also with drafts: see
        `SteadyRun`.

        `settings`: of each row, as for `choose_rows`. None: this runner has no native call for it.
        """
        shape = batch.shape
        if not self.can_repeat or shape.wants_hidden or shape.keeps_hidden:
            return None
        assert shape.n_tokens == shape.n_outputs == len(settings), "one row for each sequence"
        inputs: dict[str, Numbers] = {"tokens": [0] * shape.n_tokens, **batch.inputs}
        program = self.local.steady(self.padded(shape), batch, inputs, settings)
        return None if program is None else SteadyRun(self, program, shape)

    @property
    def can_repeat(self) -> bool:
        """Whether `steady` may give something."""
        return self._hosts is None and self._takes_lists and not self._has_states

    def _packed(self, numbers: list[int]) -> Numbers:
        """Integers as all backends take them. Small tensors take longer to make than a small model's layer to run."""
        return numbers if self._takes_lists else torch.from_numpy(np.array(numbers, np.int32))

    @property
    def sends_rows(self) -> bool:
        """Whether logits come from other processes, so that it matters how many are needed (`Batch.n_best`)."""
        return self._hosts is not None

    @property
    def is_broken_off(self) -> bool:
        """Whether workers have to be connected again before the next run."""
        return self._hosts is not None and not self._hosts.is_connected

    def report_losses_to(self, report: Callable[[MotleyError], object]) -> None:
        """Any thread will call `report` when a worker is lost, also between two runs."""
        if self._hosts is not None:
            self._hosts.report_loss = report

    def restore(self, wake: Callable[[], object]) -> None:
        """Connects lost workers again, in the background and as often as it takes, then calls `wake`."""
        assert self._hosts is not None, "only workers can be lost"
        self._hosts.restore(wake)

    @property
    def n_plans(self) -> int:
        """Batch shapes that were planned so far: the first run of a shape takes longer."""
        return self.local.n_plans

    @property
    def can_chain(self) -> bool:
        """Whether a batch can be launched before the host knows its tokens: all work is on one GPU, in one order.

        False if the cache is demand-paged: a batch in flight may still write for a request that has ended.
        """
        return self._can_chain

    def settle_rows(self) -> None:
        """Measures from how many rows on batches multiply by borrowed weights. To be called once, while no other work
        uses the cores, before such batches run.
        """
        self.local.settle_rows()

    def plan(self, shape: BatchShape) -> None:
        """Make the plan that batches of a shape run by."""
        self.local.prepare(self.padded(shape))

    def bucket(self, n_rows: int) -> int:
        """The rows of the plan that runs `n_rows`."""
        return self.padded(BatchShape(n_rows, n_rows)).n_tokens

    def preparation(self, n_rows: int, n_sequences: int, most_rows: int) -> Hashable:
        """The preparation that is made once for batches like one of `n_rows` of `n_sequences`, all with logits: a plan,
        and where devices record their kernels, a graph. Equal values: the same preparation. `most_rows`: of a sequence.
        """
        layouts = frozenset(b.layout(n_rows, n_sequences, most_rows) for b in self._backends)
        return self.bucket(n_rows), layouts

    def computed_rows(self, n_rows: int) -> int:
        """The rows that are computed for `n_rows`: with padding, where devices compute that."""
        return self.bucket(n_rows) if all(b.computes_padding for b in self._backends) else n_rows

    def padded(self, shape: BatchShape) -> BatchShape:
        """The shape that plans are made for: see `padded`."""
        found = self._padded_shapes.get(shape)
        if found is None:
            found = padded(shape, self._backends)
            if len(self._padded_shapes) >= _MAX_SHAPES:
                self._padded_shapes.clear()
            self._padded_shapes[shape] = found
        return found

    def store_random(self, manager: CacheManager, sequence: int, n_tokens: int) -> None:
        """Fills the next slots of a sequence with random keys and values. The slots must be reserved before."""
        batch = group_batches(manager, [Extent(sequence, manager.n_tokens(sequence), n_tokens)])
        if self._hosts is not None:
            self._hosts.store_random(batch)
        self.local.store_random(batch)

    def shift(self, shifts: Sequence[BlockShift]) -> None:
        """Moves cached K/V to earlier positions, or to other slots of the same positions, immediately."""
        if self._hosts is not None:
            self._hosts.shift(shifts)
        self.local.shift(shifts)

    @property
    def refuses_trees(self) -> str | None:
        """Why the rows of a sequence cannot be a tree in this runner's batches; None if they can."""
        if self._has_states:
            return "the model has layers with a recurrent state, which has one past"
        names = [backend.name for backend in self._backends if not backend.has_trees]
        return f"attention of {names[0]} devices has no masks over the rows of a batch" if names else None

    def require_shift(self) -> None:
        """CacheError if this model's context cannot shift: its keys cannot move, or it has recurrent states."""
        if self._has_states:
            raise CacheError(
                "the context cannot shift: the model has layers with a recurrent state, which cannot forget tokens",
                hint="run without context shift, with a larger context (-c)",
            )
        self.local.require_shift()
        if self._hosts is not None:
            self._hosts.require_shift()

    @property
    def is_demand_paged(self) -> bool:
        """Whether the memory of empty blocks can be released."""
        return self._is_demand_paged

    def give_back(self, emptied: Sequence[Sequence[int]]) -> None:
        """Releases the memory of empty blocks. `emptied`: blocks of each cache group; see Arena.give_back."""
        if self._hosts is not None:
            self._hosts.give_back(emptied)
        self.local.give_back(emptied)

    def gather(self, layer: int, slots: torch.Tensor) -> list[tuple[dict[str, torch.Tensor], ...]]:
        """K and V of each device's heads of a layer; see Arena.gather."""
        others = (
            [] if self._hosts is None else [w.gather(layer, slots) for w in self._hosts.connected_workers()]
        )
        return self._in_order([self.local.gather(layer, slots), *others])

    def scatter(self, layer: int, slots: torch.Tensor, parts: Sequence[Sequence[Planes]]) -> None:
        """The reverse of `gather`."""
        workers = [] if self._hosts is None else self._hosts.connected_workers()
        for rank, scatter in enumerate((self.local.scatter, *(worker.scatter for worker in workers))):
            own = [part for part, owner in zip(parts, self._owners, strict=True) if owner == rank]
            scatter(layer, slots, own)

    def memory(self) -> list[dict[str, int]]:
        """Bytes by purpose, for each device."""
        others = (
            [] if self._hosts is None else [worker.memory()[0] for worker in self._hosts.connected_workers()]
        )
        return self._in_order([self.local.memory(), *others])

    def cache_bytes(self) -> list[CacheBytes]:
        """The bytes of each device's part of the cache."""
        others = (
            [] if self._hosts is None else [worker.memory()[1] for worker in self._hosts.connected_workers()]
        )
        return self._in_order([self.local.cache_bytes(), *others])

    def _in_order(self, results: Sequence[Sequence[T]]) -> list[T]:
        """The results of each process's devices, in the order of the crew's devices."""
        left = [iter(own) for own in results]
        return [next(left[owner]) for owner in self._owners]

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
        self.local.close()
        self._backends.clear()


def padded(shape: BatchShape, backends: Sequence[Backend]) -> BatchShape:
    """The shape that plans of a crew are made for: rows are rounded up to a bucket, if the devices agree on one.

    Devices that do not compute padding take what the others need.
    """
    deciding = [backend for backend in backends if backend.computes_padding] or backends
    n_tokens = {backend.bucket(shape.n_tokens) for backend in deciding}
    n_outputs = {backend.output_bucket(shape.n_tokens, shape.n_outputs) for backend in deciding}
    if len(n_tokens) > 1 or len(n_outputs) > 1:
        return shape
    return replace(shape, n_tokens=n_tokens.pop(), n_outputs=n_outputs.pop())


def _max_experts(n_used: int, experts: ExpertParams) -> int:
    """`BatchShape.n_experts` for a batch whose tokens use up to `n_used`: powers of two, so that plans are few."""
    if n_used <= experts.n_used:
        return 0
    return min(1 << (n_used - 1).bit_length(), experts.n_experts)
