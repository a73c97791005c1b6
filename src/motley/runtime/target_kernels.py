"""The kernels of a crew's GPUs of one kind: recorded in tiers, and compiled for that kind by a process of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from motley.milestones import mark
from motley.runtime.loading import Progress

if TYPE_CHECKING:
    from motley.backends.gpu import Compiled, Compiler, Job, Manifest, Target


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
