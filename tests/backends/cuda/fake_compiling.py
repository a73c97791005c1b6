"""Stand-ins for a GPU, for the processes that compile its kernels, and for what runs batches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import motley
from motley.backends import Backend, get_backend, gpu
from motley.backends.cuda.planning import GpuPlanning
from motley.gguf import read_spec
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, read_params
from motley.runtime import CacheConfig, fit_cache, make_crew, split_model, warming
from motley.runtime.rehearsals import tiers
from motley.runtime.warming import KernelWarmer
from motley.split.lent_layers import LentLayers

MODEL = Path(motley.__file__).parent / "bundled" / "motley-15m-q8_0.gguf"
N_BATCH, N_PARALLEL = 64, 2
N_SHAPES = sum(len(tier.shapes) for tier in tiers(N_BATCH, N_PARALLEL))


class FakeGpu(GpuPlanning):
    """A GPU that is not there."""

    def load(self, weight: Any) -> Any:
        raise AssertionError("nothing is loaded here")

    def prepare(self, plan: Any, weights: Any) -> Any:
        raise AssertionError("nothing runs here")


class FakeCompiler:
    """Compiles a job as soon as it has it."""

    def __init__(self, *_: object) -> None:
        self.jobs: list[object] = []
        self.urgent: list[object] = []
        self.n_manifests = 0
        self.limits: list[int | None] = []
        self.is_closed = False

    @property
    def n_jobs(self) -> int:
        return len(self.jobs)

    def submit(self, jobs: list[object], *, is_urgent: bool = True) -> None:
        self.jobs += jobs
        self.urgent += jobs if is_urgent else []

    def send(self, manifest: object) -> None:
        self.n_manifests += 1

    def limit(self, n_at_once: int | None) -> None:
        self.limits.append(n_at_once)

    def is_done(self, n_jobs: int) -> bool:
        return False  # so that recording goes on

    def wait(self, n_jobs: int, on_done: object = None) -> list[gpu.Compiled]:
        return [gpu.Compiled("a kernel", 0.5)] * n_jobs

    def when_done(self, n_jobs: int) -> float:
        return time.monotonic()

    def leave(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class FakeManifest:
    exists = False

    def __init__(self, *_: object) -> None: ...


class FakeRunner:
    """Each batch has one kernel, of its rows. `on_run` is called before."""

    def __init__(self, name: str, said: list[str], on_run: Callable[[int], None] | None = None) -> None:
        self._name, self._said, self._on_run = name, said, on_run
        self.is_closed = False

    def record(self, batch: Any, devices: tuple[int, ...], lends: bool | None) -> torch.Tensor:
        n_tokens = batch.shape.n_tokens
        if self._on_run is not None:
            self._on_run(n_tokens)
        self._said.append(f"{self._name} {n_tokens}" + (f" on {devices}" if devices != (0,) else ""))
        assert _now is not None, "kernels are recorded here"
        _now(n_tokens, batch.shape.n_outputs)
        return torch.empty(0)

    def plan(self, shape: BatchShape) -> None:
        self._said.append(f"{self._name} plans {shape.n_tokens}")

    def close(self) -> None:
        self.is_closed = True


_now: Callable[[int, int], None] | None = None


@contextlib.contextmanager
def fake_recording(jobs: dict[Any, None], on_new: Callable[[Any], None] | None) -> Iterator[None]:
    global _now

    def note(*job: int) -> None:
        if job not in jobs:
            jobs[job] = None
            if on_new is not None:
                on_new(job)

    _now = note
    try:
        yield
    finally:
        _now = None


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are recorded and compiled as on a GPU, by the fakes."""
    monkeypatch.setattr(gpu, "can_compile_ahead", lambda: True)
    monkeypatch.setattr(gpu, "Compiler", FakeCompiler)
    monkeypatch.setattr(gpu, "Manifest", FakeManifest)
    monkeypatch.setattr(gpu, "recording", fake_recording)
    monkeypatch.setattr(gpu.Target, "of", staticmethod(lambda _: gpu.Target(90, 227 << 10)))
    for name in ("load_compiler", "load_driver", "load_library"):
        monkeypatch.setattr(gpu, name, lambda *_: None)


def make_warmer(
    devices: str = "cpu",
    gpus: Sequence[str | None] | None = None,
    *,
    lent: LentLayers | None = None,
    **options: bool,
) -> tuple[KernelWarmer, list[Backend]]:
    """`gpus`: the GPU that each device is; None: a CPU."""
    spec, kind = read_spec(MODEL), get_cache_type("f16")
    config, crew = CacheConfig(kind, kind), replace(make_crew(devices), lent=lent)
    split = split_model(spec, read_params(spec), crew, config, n_ctx=64, rotate=True)
    hosts = [get_backend("auto") for _ in crew.devices]
    fit = fit_cache(split, hosts, config, n_batch=N_BATCH, n_parallel=N_PARALLEL)
    names = ["cuda:0" for _ in crew.devices] if gpus is None else gpus
    backends = [get_backend("auto") if name is None else FakeGpu(name) for name in names]
    made = KernelWarmer(split, backends, fit.plan, n_batch=N_BATCH, n_parallel=N_PARALLEL, **options)
    return made, backends


def compiler_of(warmer: KernelWarmer) -> FakeCompiler:
    (kernels,) = warmer._kernels
    assert isinstance(kernels._compiler, FakeCompiler)
    return kernels._compiler


def record_early(
    monkeypatch: pytest.MonkeyPatch, said: list[str], on_run: Callable[[int], None] | None = None
) -> tuple[KernelWarmer, FakeRunner]:
    """A warmer whose thread has begun to record by stand-ins."""
    twin = FakeRunner("stand-in", said, on_run)
    monkeypatch.setattr(warming, "stand_in_runner", lambda *_: twin)
    warmer, backends = make_warmer()
    warmer.record_early(backends, [None])
    return warmer, twin


def wait_for_thread(warmer: KernelWarmer) -> None:
    assert warmer._early is not None
    warmer._early.join(60)
    assert not warmer._early.is_alive()
