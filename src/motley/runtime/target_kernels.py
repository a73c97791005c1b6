"""The kernels of a crew's GPUs of one kind: recorded in tiers, and compiled for that kind by a process of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from motley.backends import Backend
from motley.compile_process import n_cores
from motley.milestones import mark
from motley.models import BatchShape
from motley.runtime.caching import CachePlan
from motley.runtime.loading import Progress
from motley.runtime.rehearsals import Tier
from motley.runtime.splitting import ModelSplit

if TYPE_CHECKING:
    from motley.backends.gpu import Compiled, Compiler, Job, Manifest, Target

_CPU_PART = 4  # of the cores beside a CPU device, one of so many compiles while requests run


class TargetKernels:
    """Jobs of the tiers that are recorded so far. Create it before loading: its process may start then."""

    def __init__(
        self,
        target: Target,
        devices: Sequence[int],
        manifests: Sequence[Manifest],
        n_at_once: int | None = None,
    ) -> None:
        """`devices`: of the crew, whose kernels these are. `manifests`: of the tiers, each with those before it.
        `n_at_once`: how many kernels are compiled at once while requests run; None: no limit.
        """
        self.devices = tuple(devices)
        self._target, self._n_at_once = target, n_at_once
        self._manifests = list(manifests)
        self._compiler: Compiler | None = None
        self._jobs: dict[Job, None] = {}  # recorded so far
        self._n_taken = 0  # jobs of batches that are recorded completely
        self._held: list[tuple[list[Job], bool]] = []  # not handed over yet, and whether a tier ends with it
        self._ends: list[int] = []  # jobs up to the end of each tier that was handed over

    @property
    def n_missing(self) -> int:
        """The first tier without a manifest; the number of tiers if there is none."""
        return next((i for i, each in enumerate(self._manifests) if not each.exists), len(self._manifests))

    def skip(self, n_tiers: int) -> None:
        """These tiers are compiled already."""
        self._ends = [0] * n_tiers

    def start(self) -> Compiler:
        """The compile process, which takes a second or two to be ready."""
        from motley.backends.gpu import Compiler

        if self._compiler is None:
            self._compiler = Compiler(self._target)
            if self._n_at_once is not None:
                self._compiler.limit(self._n_at_once)
        return self._compiler

    def hurry(self) -> None:
        """From now on, nothing limits how many kernels are compiled at once."""
        if self._n_at_once is not None and self._compiler is not None:
            self._compiler.limit(None)
        self._n_at_once = None

    @property
    def n_jobs(self) -> int:
        """Kernels that were recorded so far."""
        return len(self._jobs)

    @property
    def n_tiers(self) -> int:
        """Tiers that were handed over."""
        return len(self._ends)

    def record(self, run: Callable[[], None], *, is_urgent: bool) -> None:
        """Record the kernels that `run` would compile; it launches none. `is_urgent`: compile each at once."""
        from motley.backends.gpu import recording

        compiler = self.start()
        with recording(self._jobs, (lambda job: compiler.submit([job])) if is_urgent else None):
            run()

    def take(self, *, is_urgent: bool, is_last: bool) -> None:
        """The latest batch is recorded completely. `is_last`: of its tier."""
        new = [] if is_urgent else list(self._jobs)[self._n_taken :]
        self._n_taken = len(self._jobs)
        self._held.append((new, is_last))

    def hand_over(self) -> None:
        """Have everything that was taken so far compiled."""
        held, self._held = self._held, []
        for jobs, is_last in held:
            compiler = self.start()
            compiler.submit(jobs, is_urgent=False)
            if is_last:
                compiler.send(self._manifests[len(self._ends)])
                self._ends.append(compiler.n_jobs)
                mark(f"{compiler.n_jobs} kernels recorded")

    def n_jobs_of(self, tier: int) -> int:
        """Jobs of a tier that was handed over, and of those before it."""
        return self._ends[tier]

    def is_done(self, tier: int) -> bool:
        """Whether a tier that was handed over is compiled."""
        return self.start().is_done(self._ends[tier])

    def wait(self, tier: int, progress: Progress | None = None) -> list[Compiled]:
        """Wait for a tier that was handed over; returns its kernels, and those of the tiers before it. DeviceError: the
        process has ended.
        """
        return self.start().wait(self._ends[tier], progress)

    def when_done(self, tier: int) -> float:
        """When that tier was compiled, on the clock of `time.monotonic`."""
        return self.start().when_done(self._ends[tier])

    def leave(self) -> None:
        """What was handed over is still compiled, also if this process ends."""
        if self._compiler is not None:
            self._compiler.leave()

    def close(self) -> None:
        """Nothing is compiled any more."""
        self._held.clear()
        if self._compiler is not None:
            self._compiler.close()


def kernels_of(
    split: ModelSplit,
    cache: CachePlan,
    compiling: Mapping[int, Backend],
    names: Sequence[str],
    tiers: Sequence[Tier],
) -> list[TargetKernels]:
    """The kernels of each kind of GPU of a crew, in tiers. `compiling`: the backends of this process's GPUs, by device.
    `names`: of all devices' backends. None if workers would run each batch once for each kind.
    """
    from motley.backends import gpu

    devices_of: dict[Target, list[int]] = {}
    for device, backend in compiling.items():
        devices_of.setdefault(gpu.Target.of(backend.device), []).append(device)
    if split.crew.hosts and len(devices_of) > 1:
        return []
    has_cpu = len(compiling) < len(split.crew.members(0))
    n_at_once = max(1, n_cores() // (_CPU_PART * len(devices_of))) if has_cpu else None
    found = []
    for target, devices in sorted(devices_of.items()):
        first_of = {compiling[device].device: device for device in devices[::-1]}
        places = [first_of[compiling[device].device] for device in devices]  # equal ones: on one GPU
        variants = [compiling[device].kernel_variant for device in devices]
        described = target, names, places, variants, _description(split, cache, devices)
        manifests = [gpu.Manifest(*described, list(tiers[: i + 1])) for i in range(len(tiers))]
        found.append(TargetKernels(target, devices, manifests, n_at_once))
    return found


def _description(split: ModelSplit, cache: CachePlan, devices: Sequence[int]) -> list[object]:
    """All properties of a model on its crew that kernels of these devices may depend on. The number of layers whose
    experts are elsewhere is none of them: it may follow from the memory that is free.
    """
    crew = split.crew
    shares = [split.share(device, BatchShape(1, 1), lends=False) for device in devices]
    if crew.borrower is not None and crew.borrower in devices:
        shares.append(split.lent_share(crew.borrower))
    weights = [sorted({(weight.dtype, weight.shape) for weight in share.graph.weights}) for share in shares]
    ops = [sorted({node.op.name for node in share.graph.nodes}) for share in shares]
    config = cache.config
    heads = [sorted(set(heads.values())) for heads in cache.heads]
    windows = [group.window for group in cache.groups]
    kinds = config.k_type.name, config.v_type.name, config.block_size, config.state_type
    apart = crew.apart and replace(crew.apart, n_layers=0)
    return [
        devices,
        weights,
        ops,
        kinds,
        cache.head_dim,
        heads,
        windows,
        repr(replace(split.options, n_ctx=0)),
        crew.mode,
        crew.groups,
        repr(apart),
        repr(crew.lent),
    ]
