"""Compiles kernels before the first request, so that no request waits for the compiler.

Inert batches (`inert_batch`: nothing is stored, no context is read) go through the runner without kernel launches, one
for each class of batch sizes for which kernels differ. The kernels that they would have compiled are compiled on all
cores meanwhile. A manifest beside the compiled kernels records that this is done: later processes skip it.

Loading waits only for the kernels of a single row, about a fifth of all. Those of a few rows and then all others,
samplers among them, are compiled while requests run (`rehearsals.tiers`, `background_warming`). Until then, steps have
no more rows than that (`KernelWarmer.max_rows`): a prompt is computed in small chunks, further requests wait in the
queue, and tokens are chosen on the host.
At last a decode of one request is run: its kernels are loaded, its plan is made and captured. Prompts of a whole batch,
steps with drafts and decodes of several requests are prepared later, while the engine is idle.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING

import torch

from motley.backends import Backend
from motley.errors import DeviceError
from motley.milestones import mark
from motley.models import N_EXPERT_USED, BatchShape
from motley.runtime.caching import CachePlan
from motley.runtime.loading import Progress
from motley.runtime.rehearsals import (
    PREPARED_ROWS,
    Rehearsal,
    captured_ahead,
    inert_batch,
    rehearse_sampling,
    tiers,
)
from motley.runtime.runner import Runner
from motley.runtime.splitting import ModelSplit
from motley.runtime.stand_in_runner import layers_to_record, stand_in_runner

if TYPE_CHECKING:
    from motley.backends.gpu import Compiled, Compiler, Job, Manifest, Target

_LARGE = 2**15  # rows of a matrix over the vocabulary, which prompts are not multiplied by
_NARROW = 32  # columns; what has fewer is no matrix of a product (a convolution)


@dataclass(frozen=True)
class WarmUp:
    """The compiled kernels: their names with core-seconds each, and the wall-clock seconds in all."""

    kernels: tuple[tuple[str, float], ...] = ()
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    n_others: int = 0  # kernels that are still being compiled, as far as they are known

    def __str__(self) -> str:
        if not self.kernels:
            return "kernels: all compiled before"
        total = sum(seconds for _, seconds in self.kernels)
        others = f"; {self.n_others} others are being compiled" if self.n_others else ""
        return f"kernels: {len(self.kernels)} compiled in {self.seconds:.1f} s ({total:.0f} s of one core){others}"

    @property
    def details(self) -> list[str]:
        """A line for each name, the slowest first; none if nothing was compiled."""
        names = Counter(name for name, _ in self.kernels)
        seconds = {name: sum(s for other, s in self.kernels if other == name) for name in names}
        slowest_first = sorted(names, key=lambda name: -seconds[name])
        return [f"  {names[name]} × {name}, {seconds[name]:.2f} s" for name in slowest_first]

    @property
    def notices(self) -> list[str]:
        """A sentence about each kernel that failed."""
        return [f"not compiled: {failure}" for failure in self.failures]


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
        self._ends: list[int] = []  # jobs up to the end of each recorded tier
        self.waiting: list[Rehearsal] = []  # batches that are not recorded yet
        self.warm_up = WarmUp()
        self._n_batch, self._max_decodes = n_batch, min(n_parallel, n_batch)
        self._is_gpu = False
        self._started = time.monotonic()
        self._jobs: dict[Job, None] = {}  # recorded so far
        self._held: list[tuple[list[Job], bool]] = []  # recorded later, and whether a tier ends with it
        self._n_recorded = 0  # tiers
        self._n_layers: int | None = None  # layers that are recorded (`layers_to_record`), once it is known
        self._manifests: list[Manifest] = []  # of the tiers
        self._target: Target | None = None
        self._compiler: Compiler | None = None
        self._libraries: list[Thread] = []
        self._preparing: list[Thread] = []
        self._early: Thread | None = None  # records while weights are loaded
        self._is_loaded, self._is_first_recorded = Event(), Event()
        if any(backend.device.type != "cuda" for backend in backends):
            return  # a CPU does not pad batches and would compute these
        own = [backend for backend in backends if not backend.is_remote]
        gpus = sorted({backend.device for backend in own}, key=str)
        from motley.backends import gpu as compiling

        if not compiling.can_compile_ahead():
            return
        self._is_gpu = not split.crew.hosts
        self._driver = _started(compiling.load_driver)
        self._preparing += [_started(compiling.load_compiler), self._driver]
        self._start_libraries(split, gpus)
        targets = sorted({compiling.Target.of(gpu) for gpu in gpus})
        variants = [backend.kernel_variant for backend in own]
        described = targets, _description(split, cache), variants
        if len(targets) > 1:  # several kinds of GPU: compiled at first use
            return
        self._target = targets[0]
        self._manifests = [
            compiling.Manifest(*described, self._tiers[: i + 1]) for i in range(len(self._tiers))
        ]
        self._n_compiled = next(
            (i for i, each in enumerate(self._manifests) if not each.exists), len(self._tiers)
        )
        self._ends, self._n_recorded = [0] * self._n_compiled, self._n_compiled
        self.waiting = [each for tier in self._tiers[self._n_compiled :] for each in tier.shapes]
        if not self._n_compiled:
            self._start_compiler()

    def _start_compiler(self) -> Compiler:
        from motley.backends.gpu import Compiler

        if self._compiler is None:
            assert self._target is not None
            self._compiler = Compiler(self._target)
        return self._compiler

    @property
    def max_rows(self) -> int | None:
        """Rows of the batches whose kernels are compiled; None: all are, or are compiled at their first use."""
        return self._tiers[max(self._n_compiled, 1) - 1].max_rows if self.is_compiling else None

    @property
    def compiles_ahead(self) -> bool:
        """Whether kernels are compiled before their first use: only on GPUs of one kind, without a CPU beside them."""
        return self._target is not None

    @property
    def is_compiling(self) -> bool:
        """Whether kernels are not compiled yet, and will be before their first use."""
        return self._n_compiled < len(self._tiers)

    def _start_libraries(self, split: ModelSplit, gpus: Sequence[torch.device]) -> None:
        """Load what multiplies prompts, on other threads: while weights are read."""
        from motley.backends import gpu as products

        weights = split.share(0, BatchShape(1, 1)).graph.weights
        matrices = (weight.shape for weight in weights if len(weight.shape) == 2)
        shapes = {(n, m) for n, m in matrices if m >= _NARROW and max(n, m) < _LARGE}
        for gpu in gpus:
            task = partial(products.load_library, gpu, self._n_batch, sorted(shapes))
            self._libraries.append(_started(task))

    def close(self) -> None:
        """Nothing is recorded any more. What was recorded is still compiled, for the next process."""
        self._n_compiled = len(self._tiers)
        if self._compiler is not None:
            self._compiler.leave()
        for thread in (*self._preparing, *self._libraries):
            thread.join()

    def abort(self) -> None:
        """The model is not loaded: nothing is compiled any more."""
        self._finish_early()
        if self._compiler is not None:
            self._compiler.close()
        self.close()

    def record_early(self, backends: Sequence[Backend], max_bytes: int | None) -> None:
        """Begin to record kernels with stand-ins for the weights, on a thread, while these are loaded: those of a first
        answer are compiled meanwhile. The others are held back, because the compiler would take cores from loading.
        `warm` records the kernels that are not recorded by then, or whose recording failed. `max_bytes`: memory for
        stand-ins.
        """
        is_first = self._compiler is not None and self._tiers[0].max_rows == 1
        if is_first and len(backends) == 1:  # several devices would do collectives, beside those of loading
            self._early = _started(partial(self._record_early, backends, max_bytes))

    def _record_early(self, backends: Sequence[Backend], max_bytes: int | None) -> None:
        try:
            self._driver.join()
            runner = stand_in_runner(self._split, backends, self._cache, max_bytes)
            if runner is None:
                return
            try:
                while self.waiting and not self._is_loaded.is_set():
                    self.record_next(runner, holds=bool(self._ends))
                    if self._ends:
                        self._is_first_recorded.set()
            finally:
                runner.close()
        finally:
            self._is_first_recorded.set()

    def wait_early(self) -> None:
        """Wait until `record_early` has handed the first kernels over: a fraction of a second."""
        if self._early is not None:
            self._is_first_recorded.wait()

    def _finish_early(self) -> None:
        """From now on, the caller's thread records."""
        self._is_loaded.set()
        if self._early is not None:
            self._early.join()

    def warm(self, runner: Runner, progress: Progress | None = None) -> WarmUp:
        """Compiles the kernels that a first request needs; `progress(done, total)` counts them. Kernels of other
        batches are recorded as long as that takes, or all of them after `record_early`. One that fails here is
        compiled at first use.
        """
        self._finish_early()
        if self._n_compiled or self._compiler is None:
            return self.warm_up
        while not self._ends:
            self.record_next(runner)
        if progress is not None:
            progress(0, self._ends[0])
        runner.plan(BatchShape(1, 1))  # of a first answer, while its kernels are compiled
        # With stand-ins, few kernels remain to be recorded, and a short command should leave none to the next one.
        while self.waiting and (self._early is not None or not self._compiler.is_done(self._ends[0])):
            self.record_next(runner, holds=True)
        self.advance(progress=progress)
        self._hand_over()
        return self.warm_up

    def record_next(self, runner: Runner, *, holds: bool = False) -> None:
        """Record the kernels of the next waiting batch, and have them compiled: a fraction of a second. `holds`: not
        before the next call of `record_next` or the end of `warm`.
        """
        from motley.backends.gpu import recording

        compiler = self._start_compiler()
        if not self._jobs:
            self._started = time.monotonic()
        if self._n_layers is None:
            self._n_layers = layers_to_record(self._split)
        tier, n_before = self._tiers[self._n_recorded], len(self._jobs)
        shape, longest = self.waiting[0]
        some_layers = replace(shape, n_layers=self._n_layers)
        is_first = not self._n_recorded  # kernels of a first answer are compiled as soon as they are recorded
        with recording(self._jobs, (lambda job: compiler.submit([job])) if is_first else None):
            self._run_inert(runner, some_layers, longest, samples=tier.max_rows is None)
        del self.waiting[0]  # not before: what has failed is recorded again
        is_last = (shape, longest) == tier.shapes[-1]
        new = [] if is_first else list(self._jobs)[n_before:]
        self._held.append((new, is_last))
        self._n_recorded += is_last
        if not holds:
            self._hand_over()

    def _hand_over(self) -> None:
        """Have all recorded kernels compiled."""
        held, self._held = self._held, []
        for jobs, is_last in held:
            assert self._compiler is not None
            self._compiler.submit(jobs, is_urgent=False)
            if is_last:
                self._compiler.send(self._manifests[len(self._ends)])
                self._ends.append(self._compiler.n_jobs)
                mark(f"{self._compiler.n_jobs} kernels recorded")

    def advance(self, *, waits: bool = True, progress: Progress | None = None) -> bool:
        """Whether another tier's kernels are compiled now. `waits`: wait for that, if the tier is recorded."""
        if not self.is_compiling or len(self._ends) <= self._n_compiled or self._compiler is None:
            return False
        n_jobs = self._ends[self._n_compiled]
        if not waits and not self._compiler.is_done(n_jobs):
            return False
        try:
            done = self._compiler.wait(n_jobs, progress)
        except DeviceError as error:
            self.give_up(error.message)
            return True
        self.warm_up = self._summary(done)
        mark(f"{n_jobs} kernels compiled", self._compiler.when_done(n_jobs))
        self._n_compiled = min(self._n_compiled + 1, len(self._tiers))
        if self._n_compiled == len(self._tiers):
            self._compiler.leave()
        return True

    def give_up(self, why: str) -> None:
        """End the processes. What is not compiled will be at its first use."""
        self.warm_up = replace(self.warm_up, failures=(*self.warm_up.failures, why), n_others=0)
        self.waiting.clear()
        self._held.clear()
        self._n_compiled = len(self._tiers)
        if self._compiler is not None:
            self._compiler.close()

    def _summary(self, done: Sequence[Compiled]) -> WarmUp:
        assert self._compiler is not None
        kernels = tuple((each.name, each.seconds) for each in done)
        failures = tuple(f"{each.name}: {each.error}" for each in done if each.error)
        seconds = self._compiler.when_done(len(done)) - self._started
        return WarmUp(kernels, seconds, failures, len(self._jobs) - len(done))

    def run_first_batches(self, runner: Runner) -> float:
        """Run the batches of a first request on GPUs: a decode, launched once and then captured, and, while batches
        have few rows, a part of a prompt.

        Returns the seconds that the plan of a decode takes, its capture included; 0.0: not measured.
        """
        if not self._is_gpu:
            return 0.0
        for thread in self._preparing:
            thread.join()
        n_prompt, samples = min(self.max_rows or 1, self._n_batch), self.max_rows is None
        if n_prompt > 1:
            self._run_inert(runner, BatchShape(n_prompt, 1), n_prompt)
        self._run_inert(runner, BatchShape(1, 1), 1, samples=samples)
        started = time.perf_counter()
        self._run_inert(runner, BatchShape(1, 1), 1, samples=samples)
        return 2 * (
            time.perf_counter() - started
        )  # the first run has loaded kernels, too; a plan takes as long

    @property
    def batches_ahead(self) -> list[Rehearsal]:
        """Batches of later requests, to be run while the engine is idle: a prompt of a whole batch, which loads kernels
        and libraries, and decode batches, which are captured.
        """
        prompt = BatchShape(self._n_batch, 1), self._n_batch
        return [prompt, *captured_ahead(self._max_decodes)] if self._is_gpu else []

    def run_ahead(self, runner: Runner, shape: BatchShape, longest: int) -> None:
        """Run one of `batches_ahead`."""
        for thread in self._libraries:
            thread.join()
        self._run_inert(runner, shape, longest)

    @property
    def draft_rows(self) -> tuple[int, ...]:
        """Rows of a sequence with drafts for which `prepare_drafts` makes plans, the most useful first."""
        return tuple(n for n in PREPARED_ROWS if n <= self._n_batch) if self._is_gpu else ()

    def prepare_drafts(self, runner: Runner, n_rows: int) -> None:
        """Makes the plan of a step of one sequence with `n_rows`, and captures it, so that no answer waits for that."""
        for _ in range(2):
            self._run_inert(runner, BatchShape(n_rows, n_rows), n_rows)

    def _run_inert(self, runner: Runner, shape: BatchShape, longest: int, *, samples: bool = True) -> None:
        batch = inert_batch(shape, longest, self._cache, self._extra)
        logits = runner.run(batch, [0] * shape.n_tokens, ())
        if samples:
            rehearse_sampling(logits)


def _started(task: Callable[[], None]) -> Thread:
    """A thread that does the task. A failure is left to the first batch, which reports it."""

    def work() -> None:
        with suppress(Exception):
            task()

    thread = Thread(target=work, name="motley-preparing")
    thread.start()
    return thread


def _description(split: ModelSplit, cache: CachePlan) -> list[object]:
    """All properties of a model on its crew that kernels may depend on."""
    weights = {
        (weight.dtype, weight.shape)
        for device in range(len(split.crew))
        for weight in split.share(device, BatchShape(1, 1)).graph.weights
    }
    config = cache.config
    heads = [sorted(set(heads.values())) for heads in cache.heads]
    windows = [group.window for group in cache.groups]
    kinds = config.k_type.name, config.v_type.name, config.block_size, config.state_type
    return [
        sorted(weights),
        kinds,
        cache.head_dim,
        heads,
        windows,
        repr(replace(split.options, n_ctx=0)),
        split.crew.mode,
        split.crew.groups,
    ]
