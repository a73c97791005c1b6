"""Compiles kernels before the first request, so that no request waits for the compiler.

Inert batches (`inert_batch`: nothing is stored, no context is read) go through the runner without kernel launches, one
for each class of batch sizes for which kernels differ. The kernels that they would have compiled are compiled on all
cores meanwhile. A manifest beside the compiled kernels records that this is done: later processes skip it.
At last the batches of a first request are run: kernels and libraries are loaded, plans made, and a decode is captured.
Steps with drafts are prepared later, while the engine is idle: `prepare_drafts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np
import torch

from motley.backends import Backend
from motley.errors import DeviceError
from motley.kvcache.arena import GroupBatch, SequenceTable
from motley.kvcache.state_arena import StateBatch
from motley.models import N_EXPERT_USED, BatchShape
from motley.runtime.batch import PlacedBatch
from motley.runtime.caching import CachePlan
from motley.runtime.loading import Progress
from motley.runtime.runner import Runner
from motley.runtime.splitting import ModelSplit

if TYPE_CHECKING:
    from motley.backends.gpu import Compiler, Manifest

# Rows of decode batches for which kernels differ: one row; a few; one, two, four tiles of a tensor core; two tiles of
# tokens.
_DECODE_ROWS = (1, 2, 16, 32, 64, 128)
# Rows of a sequence with drafts for which kernels differ; one with more rows is taken for a prompt.
_DRAFT_ROWS = (4, 8, 16)
_PREPARED_ROWS = (8, 4, 16, 2)
# Rows of prompts for which kernels differ: spans of each size, and matrix products by the library.
_PROMPT_ROWS = (32, 64, 128, 256)
_LARGE = 2**15  # rows of a matrix over the vocabulary, which prompts are not multiplied by
_NARROW = 32  # columns; what has fewer is no matrix of a product (a convolution)
_FEW_ROWS = _DRAFT_ROWS[-1]  # a sequence with more rows in a batch is a prompt
_BESIDE_ROWS = (1, 4, 16, 64)  # requests that decode beside a prompt: of many, contexts are split less


@dataclass(frozen=True)
class WarmUp:
    """The compiled kernels: their names with core-seconds each, and the wall-clock seconds in all."""

    kernels: tuple[tuple[str, float], ...] = ()
    seconds: float = 0.0
    failures: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.kernels:
            return "kernels: all compiled before"
        total = sum(seconds for _, seconds in self.kernels)
        return f"kernels: {len(self.kernels)} compiled in {self.seconds:.1f} s ({total:.0f} s of one core)"


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
    ) -> None:
        self._cache = cache
        experts = split.params.experts
        self._extra = {} if experts is None else {N_EXPERT_USED: experts.n_used}
        n_batch = min(n_batch, n_parallel * split.options.n_ctx)  # no batch is larger
        self._shapes = list(rehearsals(n_batch, n_parallel))
        self._n_batch = n_batch
        self._is_gpu = False
        self._manifest: Manifest | None = None
        self._compiler: Compiler | None = None
        self._libraries: list[Thread] = []
        if any(backend.device.type != "cuda" for backend in backends):
            return  # a CPU does not pad batches and would compute these
        own = [backend for backend in backends if not backend.is_remote]
        gpus = sorted({backend.device for backend in own}, key=str)
        from motley.backends import gpu as compiling

        if not compiling.can_compile_ahead():
            return
        self._is_gpu = not split.crew.hosts
        self._start_libraries(split, gpus)
        targets = sorted({compiling.Target.of(gpu) for gpu in gpus})
        variants = [backend.kernel_variant for backend in own]
        manifest = compiling.Manifest(targets, _description(split, cache), variants, self._shapes)
        if not manifest.exists and len(targets) == 1:  # several kinds of GPU: compiled at first use
            self._manifest, self._compiler = manifest, compiling.Compiler(targets[0])

    def _start_libraries(self, split: ModelSplit, gpus: Sequence[torch.device]) -> None:
        """Load what multiplies prompts, on other threads: while weights are read."""
        from motley.backends import gpu as products

        weights = split.share(0, BatchShape(1, 1)).graph.weights
        matrices = (weight.shape for weight in weights if len(weight.shape) == 2)
        shapes = {(n, m) for n, m in matrices if m >= _NARROW and max(n, m) < _LARGE}
        for gpu in gpus:
            task = partial(products.load_library, gpu, self._n_batch, sorted(shapes))
            self._libraries.append(Thread(target=_try, args=(task,), name=f"motley-{gpu}"))
            self._libraries[-1].start()

    def close(self) -> None:
        """Ends the processes, if they still run."""
        for thread in self._libraries:
            thread.join()
        if self._compiler is not None:
            self._compiler.close()

    def warm(self, runner: Runner, progress: Progress | None = None) -> WarmUp:
        """Compiles the kernels; `progress(done, total)` counts them. One that fails here is compiled at first use."""
        if self._compiler is None or self._manifest is None:
            return WarmUp()
        from motley.backends.gpu import Job, recording

        started = time.perf_counter()
        jobs: dict[Job, None] = {}
        n_sent = 0
        try:
            for shape, longest in self._shapes:
                with recording(jobs):
                    self._run_inert(runner, shape, longest)
                self._compiler.submit(list(jobs)[n_sent:])
                n_sent = len(jobs)
            done = self._compiler.finish(progress)
        except DeviceError as error:
            return WarmUp(seconds=time.perf_counter() - started, failures=(error.message,))
        finally:
            self.close()
        failures = tuple(f"{each.name}: {each.error}" for each in done if each.error)
        if not failures:
            self._manifest.write(done)
        kernels = tuple((each.name, each.seconds) for each in done)
        return WarmUp(kernels, time.perf_counter() - started, failures)

    def run_first_batches(self, runner: Runner) -> float:
        """Run the batches of a first request on GPUs: a prompt, and a decode, launched once and then captured.

        Returns the seconds that the plan of a decode takes, its capture included; 0.0: not measured.
        """
        if not self._is_gpu:
            return 0.0
        for thread in self._libraries:
            thread.join()
        self._run_inert(runner, BatchShape(self._n_batch, 1), self._n_batch)
        started = time.perf_counter()
        for _ in range(2):
            self._run_inert(runner, BatchShape(1, 1), 1)
        return time.perf_counter() - started

    @property
    def draft_rows(self) -> tuple[int, ...]:
        """Rows of a sequence with drafts for which `prepare_drafts` makes plans, the most useful first."""
        return tuple(n for n in _PREPARED_ROWS if n <= self._n_batch) if self._is_gpu else ()

    def prepare_drafts(self, runner: Runner, n_rows: int) -> None:
        """Makes the plan of a step of one sequence with `n_rows`, and captures it, so that no answer waits for that."""
        for _ in range(2):
            self._run_inert(runner, BatchShape(n_rows, n_rows), n_rows)

    def _run_inert(self, runner: Runner, shape: BatchShape, longest: int) -> None:
        batch = inert_batch(shape, longest, self._cache, self._extra)
        _rehearse_sampling(runner.run(batch, [0] * shape.n_tokens, ()))


def rehearsals(n_batch: int, n_parallel: int) -> Iterator[tuple[BatchShape, int]]:
    """Batch shapes that together use every kernel, each with the number of rows of its longest sequence.

    Prompts come first, the longest before the others: their kernels take the compiler the most time.
    """
    prompts = [n for n in _PROMPT_ROWS if n <= n_batch]
    yield from ((BatchShape(n, 1), n) for n in dict.fromkeys([n_batch, *prompts]) if n > _FEW_ROWS)
    decodes = [n for n in _DECODE_ROWS if n <= min(n_parallel, n_batch)]
    yield from ((BatchShape(n, n), 1) for n in dict.fromkeys([*decodes, min(n_parallel, n_batch)]))
    yield from ((BatchShape(n, n), n) for n in _DRAFT_ROWS if n <= n_batch)
    for n in _BESIDE_ROWS:  # a prompt in one batch with requests that decode
        if n < n_parallel and _FEW_ROWS + 1 + n <= n_batch:
            yield BatchShape(_FEW_ROWS + 1 + n, 1 + n), _FEW_ROWS + 1


def inert_batch(
    shape: BatchShape, longest: int, cache: CachePlan, extra: Mapping[str, int] | None = None
) -> PlacedBatch:
    """A batch that stores nothing and reads no context: it has no slots, and its positions are before its tables.

    `longest`: rows of its first sequence, which is a prompt if it has many rows; the other sequences have one row each.
    `extra`: other inputs of each token, by name.
    """
    size, block = cache.config.block_size, np.zeros(1, dtype=np.int32)
    starts = [0, *range(longest, shape.n_tokens)]
    tables = [
        SequenceTable(start, n, -n - size, 0, block)
        for start, n in zip(starts, [longest] + [1] * len(starts), strict=False)
    ]
    batch = GroupBatch(torch.empty(0, dtype=torch.int64), tuple(tables))
    zeros = {"positions": shape.n_tokens, "output_rows": shape.n_outputs}
    inputs = {name: torch.zeros(n, dtype=torch.int32) for name, n in zeros.items()}
    for name, value in (extra or {}).items():
        inputs[name] = torch.full((shape.n_tokens,), value, dtype=torch.int32)
    states = () if cache.states is None else (StateBatch(()),)
    return PlacedBatch(shape, inputs, (*(batch for _ in cache.groups), *states))


def _try(task: Callable[[], None]) -> None:
    """A failure is left to the first batch, which reports it."""
    with suppress(Exception):
        task()


def _rehearse_sampling(logits: torch.Tensor) -> None:
    from motley.backends.gpu import DeviceSampler, RowSettings

    if logits.device.type == "cuda":
        n = len(logits)
        edits = {0: {0: (1, 0.0)}}
        DeviceSampler(logits.device).launch(logits, [RowSettings(0.8, 40)] * n, [0] * n, edits)


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
