"""Compiles kernels before the first request, so that no request waits for the compiler.

Inert batches (`inert_batch`: nothing is stored, no context is read) go through the runner without kernel launches, one
for each class of batch sizes for which kernels differ. The kernels that they would have compiled are compiled on all
cores meanwhile, for each kind of GPU in the crew (`target_kernels`). A manifest beside the compiled kernels records
that this is done: later processes skip it. A CPU in the crew computes none of these batches: what it would send to a
GPU does not matter to the GPU's kernels. Where a GPU borrows weights in batches of many rows, these batches are
recorded with and without borrowing, because the number of rows is measured, and borrowing may end.

Loading waits only for the kernels of a single row, about a fifth of all. Those of a few rows and then all others,
samplers among them, are compiled while requests run (`rehearsals.tiers`, `background_warming`). Until then, steps have
no more rows than that (`KernelWarmer.max_rows`): a prompt is computed in small chunks, further requests wait in the
queue, and tokens are chosen on the host.
Batches of first requests are run after that (`batches_ahead`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Protocol

import torch

from motley.backends import Backend
from motley.errors import DeviceError
from motley.milestones import mark
from motley.models import N_EXPERT_USED, BatchShape
from motley.runtime.batch import PlacedBatch
from motley.runtime.caching import CachePlan
from motley.runtime.loading import Progress
from motley.runtime.rehearsals import (
    Rehearsal,
    inert_batch,
    rehearse_sampling,
    tiers,
)
from motley.runtime.runner import Runner
from motley.runtime.splitting import ModelSplit
from motley.runtime.stand_in_runner import layers_to_record, stand_in_runner
from motley.runtime.target_kernels import TargetKernels, kernels_of
from motley.runtime.warm_up import WarmUp

if TYPE_CHECKING:
    from motley.backends.gpu import Compiled

_log = logging.getLogger(__name__)

_LARGE = 2**15  # rows of a matrix over the vocabulary, which prompts are not multiplied by
_NARROW = 32  # columns; what has fewer is no matrix of a product (a convolution)


class Recorder(Protocol):
    """A `Runner`, or one without weights (`stand_in_runner`)."""

    def record(self, batch: PlacedBatch, devices: Sequence[int], lends: bool | None) -> torch.Tensor:
        """See `Runner.record`."""
        ...


class KernelWarmer:
    """Compiles the kernels of a model's batches for its GPUs. Create it before loading: its processes start then."""

    def __init__(
        self,
        split: ModelSplit,
        backends: Sequence[Backend],
        cache: CachePlan,
        *,
        n_batch: int,
        n_parallel: int,
        waits_for_all: bool = False,
    ) -> None:
        """`waits_for_all`: compile all kernels before the first request."""
        self._split, self._cache = split, cache
        experts = split.params.experts
        self._extra = {} if experts is None else {N_EXPERT_USED: experts.n_used}
        n_batch = min(n_batch, n_parallel * split.options.n_ctx)  # no batch is larger
        self._tiers = tiers(n_batch, n_parallel, is_one=waits_for_all)
        self._n_compiled = len(self._tiers)  # tiers whose kernels are compiled, or are compiled at first use
        self.waiting: list[Rehearsal] = []  # batches that are not recorded yet
        self.warm_up = WarmUp()
        self._n_batch = n_batch
        self.uses_gpus, self.has_cpu = False, False  # GPUs of this process alone, with a CPU beside them
        self._started = time.monotonic()
        self._kernels: list[TargetKernels] = []  # of each kind of GPU
        self._n_recorded = 0  # tiers
        self._n_layers: int | None = None  # layers that are recorded (`layers_to_record`), once it is known
        self._libraries: list[Thread] = []
        self._preparing: list[Thread] = []
        self._early: Thread | None = None  # records while weights are loaded
        self._is_loaded, self._is_first_recorded = Event(), Event()
        crew = split.crew
        compiling = {d: backends[d] for d in crew.members(0) if backends[d].compiles_kernels}
        has_others = any(not backend.compiles_kernels for backend in backends)
        if not compiling or (crew.hosts and has_others):
            return
        from motley.backends import gpu

        if not gpu.can_compile_ahead():
            return
        self.uses_gpus, self.has_cpu = not crew.hosts, has_others
        self._driver = _started(gpu.load_driver)
        self._preparing += [_started(gpu.load_compiler), self._driver]
        self._start_libraries(compiling)
        try:
            names = [backend.name for backend in backends]
            self._kernels = kernels_of(split, cache, compiling, names, self._tiers)
            self._find_tiers()
        except Exception as error:  # a model must not fail to load for that
            self._fail(error)

    def _find_tiers(self) -> None:
        """Find the tiers that are not compiled yet, for all kinds of GPU. If there is the first one, compile processes
        start.
        """
        n_compiled = min((each.n_missing for each in self._kernels), default=len(self._tiers))
        for each in self._kernels:
            each.skip(n_compiled)
            if not n_compiled:
                each.start()
        self._n_compiled = self._n_recorded = n_compiled
        self.waiting = [each for tier in self._tiers[n_compiled:] for each in tier.shapes]

    @property
    def max_rows(self) -> int | None:
        """Rows of the batches whose kernels are compiled; None: all are, or are compiled at their first use."""
        return self._tiers[max(self._n_compiled, 1) - 1].max_rows if self.is_compiling else None

    @property
    def compiles_ahead(self) -> bool:
        """Whether kernels are compiled before their first use: those of GPUs of this process."""
        return bool(self._kernels)

    @property
    def is_compiling(self) -> bool:
        """Whether kernels are not compiled yet, and will be before their first use."""
        return self._n_compiled < len(self._tiers)

    def _start_libraries(self, compiling: Mapping[int, Backend]) -> None:
        """Load what multiplies prompts, on other threads: while weights are read."""
        from motley.backends import gpu

        shapes: dict[torch.device, set[tuple[int, int]]] = {}
        for device, backend in compiling.items():
            weights = self._split.share(device, BatchShape(1, 1)).graph.weights
            matrices = (weight.shape for weight in weights if len(weight.shape) == 2)
            own = {(n, m) for n, m in matrices if m >= _NARROW and max(n, m) < _LARGE}
            shapes[backend.device] = shapes.get(backend.device, set()) | own
        for place, found in shapes.items():
            self._libraries.append(_started(partial(gpu.load_library, place, self._n_batch, sorted(found))))

    def close(self) -> None:
        """Nothing is recorded any more. What was recorded is still compiled, for the next process."""
        self._n_compiled = len(self._tiers)
        for each in self._kernels:
            each.leave()
        for thread in (*self._preparing, *self._libraries):
            thread.join()

    def abort(self) -> None:
        """The model is not loaded: nothing is compiled any more."""
        self._finish_early()
        for each in self._kernels:
            each.close()
        self.close()

    def record_early(self, backends: Sequence[Backend], max_bytes: Sequence[int | None]) -> None:
        """Begin to record kernels with stand-ins for the weights, on a thread, while these are loaded: those of a first
        answer are compiled meanwhile. The others are held back, because the compiler would take cores from loading.
        `warm` records the kernels that are not recorded by then, or whose recording failed. `max_bytes`: memory for
        stand-ins, of each device.
        """
        is_first = bool(self._kernels) and not self._n_compiled and self._tiers[0].max_rows == 1
        if is_first and not self._split.crew.hosts:  # workers take part in recording, once they are there
            self._early = _started(partial(self._record_early, backends, max_bytes))

    def _record_early(self, backends: Sequence[Backend], max_bytes: Sequence[int | None]) -> None:
        try:
            self._driver.join()
            runner = stand_in_runner(self._split, backends, self._cache, max_bytes)
            if runner is None:
                return
            try:
                while self.waiting and not self._is_loaded.is_set():
                    self.record_next(runner, holds=self._is_handed_over(0))
                    if self._is_handed_over(0):
                        self._is_first_recorded.set()
            finally:
                runner.close()
        except Exception as error:
            _log.info("kernels are not recorded while weights are read: %s", error)
        finally:
            self._is_first_recorded.set()

    def _is_handed_over(self, tier: int) -> bool:
        """Whether all kernels of a tier are being compiled, or are compiled."""
        return all(each.n_tiers > tier for each in self._kernels)

    def wait_early(self) -> None:
        """Wait until `record_early` has handed the first kernels over: a fraction of a second."""
        if self._early is not None:
            self._is_first_recorded.wait()

    def _finish_early(self) -> None:
        """From now on, the caller's thread records."""
        self._is_loaded.set()
        if self._early is not None:
            self._early.join()

    def warm(
        self,
        runner: Runner,
        progress: Progress | None = None,
        measure: Callable[[], None] = lambda: None,
    ) -> WarmUp:
        """Compiles the kernels that a first request needs; `progress(done, total)` counts them. Kernels of other
        batches are recorded as long as that takes, or all of them after `record_early`. One that fails here is
        compiled at first use; if recording fails, all are. `measure` is called before these others are compiled: then
        no compiler uses the cores.
        """
        self._finish_early()
        if self._kernels and not self._n_compiled:
            try:
                self._warm(runner, progress)
            except Exception as error:  # a model must not fail to load for that
                self._fail(error)
        measure()
        self._hand_over()
        return self.warm_up

    def _warm(self, runner: Runner, progress: Progress | None) -> None:
        while not self._is_handed_over(0):
            self.record_next(runner)
        if progress is not None:
            progress(0, self._n_jobs_of(0))
        runner.plan(BatchShape(1, 1))  # of a first answer, while its kernels are compiled
        # With stand-ins, few kernels remain to be recorded, and a short command should leave none to the next one.
        while self.waiting and (self._early is not None or not self._is_done(0)):
            self.record_next(runner, holds=True)
        self.advance(progress=progress)

    def record_next(self, runner: Recorder, *, holds: bool = False) -> None:
        """Record the kernels of the next waiting batch, and have them compiled: a fraction of a second. `holds`: not
        before the next call of `record_next` or the end of `warm`.
        """
        if not any(each.n_jobs for each in self._kernels):
            self._started = time.monotonic()
        if self._n_layers is None:
            devices = [device for each in self._kernels for device in each.devices]
            # Workers launch the kernels of all their layers, and compile them then.
            self._n_layers = 0 if self._split.crew.hosts else layers_to_record(self._split, devices)
        tier = self._tiers[self._n_recorded]
        shape, longest = self.waiting[0]
        some_layers = replace(shape, n_layers=self._n_layers)
        is_first = not self._n_recorded  # kernels of a first answer are compiled as soon as they are recorded
        samples = tier.max_rows is None
        for each in self._kernels:
            record = partial(self._record, runner, each.devices, some_layers, longest, samples=samples)
            each.record(record, is_urgent=is_first)
        del self.waiting[0]  # not before: what has failed is recorded again
        is_last = (shape, longest) == tier.shapes[-1]
        for each in self._kernels:
            each.take(is_urgent=is_first, is_last=is_last)
        self._n_recorded += is_last
        if not holds:
            self._hand_over()

    def _record(
        self, runner: Recorder, devices: Sequence[int], shape: BatchShape, longest: int, *, samples: bool
    ) -> None:
        """Go through a batch on some devices, without launches; also as one with weights that are lent."""
        crew = self._split.crew
        may_lend = crew.borrower in devices and shape.n_tokens >= crew.min_lent_rows
        batch = inert_batch(shape, longest, self._cache, self._extra)
        for lends in (True, False) if may_lend else (False,):
            logits = runner.record(batch, devices, lends)
        if samples and crew.members(0)[0] in devices:  # this process's first device has the logits
            rehearse_sampling(logits)

    def _hand_over(self) -> None:
        """Have all recorded kernels compiled."""
        for each in self._kernels:
            each.hand_over()

    def _n_jobs_of(self, tier: int) -> int:
        return sum(each.n_jobs_of(tier) for each in self._kernels)

    def _is_done(self, tier: int) -> bool:
        return all(each.is_done(tier) for each in self._kernels)

    def advance(self, *, waits: bool = True, progress: Progress | None = None) -> bool:
        """Whether another tier's kernels are compiled now. `waits`: wait for that, if the tier is recorded."""
        tier = self._n_compiled
        if not self.is_compiling or not self._kernels or not self._is_handed_over(tier):
            return False
        if not waits and not self._is_done(tier):
            return False
        try:
            done = self._wait(tier, progress)
        except DeviceError as error:
            self.give_up(error.message)
            return True
        self.warm_up = self._summary(tier, done)
        mark(f"{len(done)} kernels compiled", max(each.when_done(tier) for each in self._kernels))
        self._n_compiled = max(tier + 1, self._n_compiled)  # all, if the model was closed meanwhile
        if self._n_compiled == len(self._tiers):
            for each in self._kernels:
                each.leave()
        return True

    def _wait(self, tier: int, progress: Progress | None) -> list[Compiled]:
        """Wait for a tier of all kinds of GPUs."""
        total = self._n_jobs_of(tier)
        done: list[Compiled] = []

        def report(n: int, _: int) -> None:
            if progress is not None:
                progress(len(done) + n, total)

        for each in self._kernels:
            done += each.wait(tier, None if progress is None else report)
        return done

    def _fail(self, error: Exception) -> None:
        """Recording has failed: kernels are compiled at their first use."""
        _log.info("kernels are not compiled ahead", exc_info=error)
        self.give_up(f"the kernels ahead of their first use ({error})")

    def give_up(self, why: str) -> None:
        """End the processes. What is not compiled will be at its first use."""
        self.warm_up = replace(self.warm_up, failures=(*self.warm_up.failures, why), n_others=0)
        self.waiting.clear()
        self._n_compiled = len(self._tiers)
        for each in self._kernels:
            each.close()

    def _summary(self, tier: int, done: Sequence[Compiled]) -> WarmUp:
        kernels = tuple((each.name, each.seconds) for each in done)
        failures = tuple(f"{each.name}: {each.error}" for each in done if each.error)
        seconds = max(each.when_done(tier) for each in self._kernels) - self._started
        n_others = sum(each.n_jobs for each in self._kernels) - len(done)
        return WarmUp(kernels, seconds, failures, n_others)

    def hurry(self) -> None:
        """Compile as fast as possible: a caller waits for it."""
        for each in self._kernels:
            each.hurry()

    def wait_prepared(self) -> None:
        """Wait for what a first batch needs beside its kernels."""
        for thread in self._preparing:
            thread.join()

    def wait_libraries(self) -> None:
        """Wait for the libraries that multiply prompts."""
        for thread in self._libraries:
            thread.join()


def _started(task: Callable[[], None]) -> Thread:
    """A thread that does the task. A failure is left to the first batch, which reports it."""

    def work() -> None:
        with suppress(Exception):
            task()

    thread = Thread(target=work, name="motley-preparing")
    thread.start()
    return thread
