"""Kernels are recorded with stand-ins while weights are loaded; what that leaves over is recorded afterwards."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import motley
from motley import assembly, compile_process
from motley.backends import Backend, get_backend, gpu
from motley.backends.cuda.planning import GpuPlanning
from motley.compile_process import n_cores
from motley.gguf import read_spec
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, read_params
from motley.runtime import CacheConfig, fit_cache, make_crew, split_model, warming
from motley.runtime.rehearsals import tiers
from motley.runtime.stand_in_runner import layers_to_record, stand_in_runner
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


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_first_jobs_are_handed_over_before_there_is_a_loaded_model(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    warmer, twin = record_early(monkeypatch, said)
    wait_for_thread(warmer)
    compiler = compiler_of(warmer)
    assert compiler.limits == []
    assert len(said) == N_SHAPES
    assert said[0] == "stand-in 1"
    assert compiler.jobs == compiler.urgent == [(1, 1)]  # the others would take cores from loading
    assert compiler.n_manifests == 1
    assert twin.is_closed
    done: list[tuple[int, int]] = []
    warmer.warm(FakeRunner("model", said), lambda *counts: done.append(counts))  # type: ignore[arg-type]
    assert said[N_SHAPES:] == ["model plans 1"]  # nothing is recorded again
    assert done == [(0, 1)]
    assert compiler.n_jobs == len(set(compiler.jobs)) == N_SHAPES
    assert compiler.urgent == [(1, 1)]
    assert compiler.n_manifests == len(tiers(N_BATCH, N_PARALLEL))
    assert warmer.warm_up.n_others == N_SHAPES - 1
    assert warmer.max_rows == 1
    while warmer.advance():
        pass
    assert not warmer.is_compiling


def test_without_stand_ins_the_loaded_model_records(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    warmer, backends = make_warmer()
    warmer.record_early(backends, [None])  # FakeGpu has no stand-in
    wait_for_thread(warmer)
    said: list[str] = []
    warmer.warm(FakeRunner("model", said))  # type: ignore[arg-type]
    assert said[:2] == ["model 1", "model plans 1"]
    assert len(said) == N_SHAPES + 1
    assert not warmer.waiting


@pytest.mark.parametrize("n_done", [0, 1, 3])
def test_what_fails_early_is_left_to_the_loaded_model(
    n_done: int, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def fail(n_rows: int) -> None:
        if len(said) == n_done:
            raise RuntimeError("no memory")

    warmer, twin = record_early(monkeypatch, said, fail)
    wait_for_thread(warmer)
    assert twin.is_closed
    assert len(said) == n_done
    warmer.warm(FakeRunner("model", said))  # type: ignore[arg-type]
    recorded = [each for each in said if "plans" not in each]
    assert len(recorded) == N_SHAPES
    assert recorded[n_done].startswith("model")
    compiler = compiler_of(warmer)
    assert compiler.n_jobs == len(set(compiler.jobs)) == N_SHAPES
    assert compiler.n_manifests == len(tiers(N_BATCH, N_PARALLEL))
    assert warmer.warm_up.failures == ()


def test_the_thread_ends_when_the_weights_are_there(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    is_at_work, goes_on = Event(), Event()

    def wait(n_rows: int) -> None:
        is_at_work.set()
        assert goes_on.wait(60)

    warmer, _ = record_early(monkeypatch, said, wait)
    assert is_at_work.wait(60)
    warmer._is_loaded.set()
    goes_on.set()
    wait_for_thread(warmer)
    assert said == ["stand-in 1"]
    warmer.warm(FakeRunner("model", said))  # type: ignore[arg-type]
    assert said[1] == "model plans 1"
    assert len(said) == N_SHAPES + 1
    assert compiler_of(warmer).n_jobs == N_SHAPES


def test_a_short_command_hands_all_jobs_over(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if weights were loaded and the first kernels compiled before the thread had recorded the others."""
    is_made = Event()

    def load(n_rows: int) -> None:
        assert is_made.wait(60)
        warmer._is_loaded.set()

    said: list[str] = []
    warmer, _ = record_early(monkeypatch, said, load)
    is_made.set()
    wait_for_thread(warmer)
    assert said == ["stand-in 1"]
    compiler = compiler_of(warmer)
    compiler.is_done = lambda n_jobs: True  # type: ignore[method-assign]
    warmer.warm(FakeRunner("model", said))  # type: ignore[arg-type]
    assert compiler.n_jobs == len(set(compiler.jobs)) == N_SHAPES
    assert compiler.n_manifests == len(tiers(N_BATCH, N_PARALLEL))
    assert not warmer.waiting
    warmer.close()


def test_without_early_recording_others_are_left_to_the_background(on_a_gpu: None) -> None:
    warmer, _ = make_warmer()
    compiler, runner = compiler_of(warmer), FakeRunner("model", [])
    compiler.is_done = lambda n_jobs: True  # type: ignore[method-assign]
    warmer.warm(runner)  # type: ignore[arg-type]
    assert compiler.jobs == [(1, 1)]
    warmer.record_next(runner)  # type: ignore[arg-type]
    assert compiler.n_jobs == 2
    assert compiler.urgent == [(1, 1)]
    warmer.give_up("no more")
    assert not warmer.is_compiling


def test_a_model_that_is_not_loaded_ends_the_thread_and_the_compiler(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmer, twin = record_early(monkeypatch, [])
    warmer.abort()
    assert twin.is_closed
    assert compiler_of(warmer).is_closed
    assert warmer._early is not None
    assert not warmer._early.is_alive()


def test_the_vocabulary_is_read_after_kernels_are_recorded(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    warmer, _ = record_early(monkeypatch, said)
    monkeypatch.setattr(assembly.Tokenizer, "from_spec", lambda _: said.append("vocabulary"))
    assembly._read_tokenizer(read_spec(MODEL), warmer)
    assert said.index("stand-in 1") < said.index("vocabulary")
    warmer.abort()


def test_models_with_drafts_record_after_loading(on_a_gpu: None) -> None:
    warmer, backends = make_warmer(waits_for_all=True)
    warmer.record_early(backends, [None])
    assert warmer._early is None
    warmer.abort()


def test_the_kernels_of_a_gpu_are_recorded_without_the_cpu_beside_it(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(warming, "stand_in_runner", lambda *_: FakeRunner("stand-in", said))
    warmer, backends = make_warmer("cpu,cpu", [None, "cuda:0"])
    assert warmer.compiles_ahead
    assert warmer.max_rows == 1
    warmer.record_early(backends, [None, None])
    wait_for_thread(warmer)
    assert len(said) == N_SHAPES
    assert all(each.endswith("on (1,)") for each in said)
    warmer.warm(FakeRunner("model", said))  # type: ignore[arg-type]
    assert compiler_of(warmer).n_manifests == len(tiers(N_BATCH, N_PARALLEL))
    assert warmer.warm_up.failures == ()
    assert warmer.uses_gpus
    assert warmer.has_cpu
    assert compiler_of(warmer).limits == [max(1, n_cores() // 4)]  # requests need the cores, too
    warmer.hurry()
    assert compiler_of(warmer).limits[1:] == [None]
    warmer.close()


def test_batches_that_may_borrow_weights_are_recorded_with_them_and_without(on_a_gpu: None) -> None:
    """How many rows a batch needs for that is measured later, and may be another number in the next process."""
    warmer, _ = make_warmer("cpu,cpu", ["cuda:0", None], lent=LentLayers(1, 0, 32))
    recorded: list[tuple[int, bool | None]] = []
    runner = FakeRunner("model", [])
    record = runner.record

    def note(batch: Any, devices: tuple[int, ...], lends: bool | None) -> torch.Tensor:
        recorded.append((batch.shape.n_tokens, lends))
        return record(batch, devices, lends)

    runner.record = note  # type: ignore[method-assign]
    warmer.warm(runner)  # type: ignore[arg-type]
    rows = {shape.n_tokens for tier in tiers(N_BATCH, N_PARALLEL) for shape, _ in tier.shapes}
    assert set(recorded) == {(n, False) for n in rows} | {(n, True) for n in rows if n >= 32}
    assert (64, True) in recorded
    assert (18, True) not in recorded
    warmer.close()


def of_two_kinds(
    monkeypatch: pytest.MonkeyPatch, *manifests: bool
) -> tuple[KernelWarmer, list[list[object]]]:
    """A warmer of two unlike GPUs, and what its manifests describe. `manifests`: whether those of a GPU are there."""
    described: list[list[object]] = []

    class Manifest:
        def __init__(self, *description: Any) -> None:
            described.append(list(description))
            is_second = description[0].capability == 90
            self.exists = bool(manifests) and manifests[is_second]

    monkeypatch.setattr(gpu, "Manifest", Manifest)
    capability = {"cuda:0": 86, "cuda:1": 90}
    monkeypatch.setattr(
        gpu.Target, "of", staticmethod(lambda device: gpu.Target(capability[str(device)], 99 << 10))
    )
    return make_warmer("cpu,cpu", ["cuda:0", "cuda:1"])[0], described


def test_each_kind_of_gpu_has_its_own_kernels_and_manifests(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmer, described = of_two_kinds(monkeypatch)
    n_tiers = len(tiers(N_BATCH, N_PARALLEL))
    assert [each[0].capability for each in described] == [86] * n_tiers + [90] * n_tiers  # type: ignore[attr-defined]
    assert [kernels.devices for kernels in warmer._kernels] == [(0,), (1,)]
    first, second = (kernels.start() for kernels in warmer._kernels)
    assert first is not second
    said: list[str] = []
    counts: list[tuple[int, int]] = []
    runner = FakeRunner("model", said)
    second.is_done = lambda n_jobs: True  # type: ignore[method-assign]
    warmer.warm(runner, lambda *given: counts.append(given))  # type: ignore[arg-type]
    assert said[:2] == ["model 1", "model 1 on (1,)"]
    assert counts == [(0, 2)]  # of both
    assert len(warmer.warm_up.kernels) == 2
    assert warmer.max_rows == 1
    first.is_done = lambda n_jobs: True  # type: ignore[method-assign]
    while warmer.waiting:
        warmer.record_next(runner)
    first.is_done = lambda n_jobs: False  # type: ignore[method-assign]
    assert not warmer.advance(waits=False)  # one of them is not done
    while warmer.advance():
        pass
    assert not warmer.is_compiling
    for kernels in warmer._kernels:
        compiler = kernels.start()
        assert isinstance(compiler, FakeCompiler)
        assert compiler.n_jobs == N_SHAPES
        assert compiler.n_manifests == n_tiers
    warmer.close()


@pytest.mark.parametrize(("manifests", "is_compiling"), [((True, False), True), ((True, True), False)])
def test_a_kind_of_gpu_without_manifests_is_compiled_for(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, manifests: tuple[bool, bool], is_compiling: bool
) -> None:
    warmer, _ = of_two_kinds(monkeypatch, *manifests)
    assert warmer.is_compiling == is_compiling
    assert bool(warmer.waiting) == is_compiling
    warmer.abort()


def test_what_was_recorded_before_a_failure_is_compiled_once(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second GPU's recording fails, after that of the first: both are recorded again."""
    warmer, _ = of_two_kinds(monkeypatch)
    runner = FakeRunner("model", [])
    for kernels in warmer._kernels:
        kernels.start().is_done = lambda n_jobs: True  # type: ignore[method-assign]
    warmer.warm(runner)  # type: ignore[arg-type]
    record, n_calls = runner.record, 0

    def fail_once(batch: Any, devices: tuple[int, ...], lends: bool | None) -> torch.Tensor:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:
            raise RuntimeError("no memory")
        return record(batch, devices, lends)

    runner.record = fail_once  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        warmer.record_next(runner)
    while warmer.waiting:
        warmer.record_next(runner)
    for kernels in warmer._kernels:
        compiler = kernels.start()
        assert isinstance(compiler, FakeCompiler)
        assert compiler.n_jobs == len(set(compiler.jobs)) == N_SHAPES
    warmer.abort()


def test_a_model_whose_kernels_cannot_be_recorded_is_loaded(on_a_gpu: None) -> None:
    warmer, _ = make_warmer("cpu,cpu", ["cuda:0", None])

    def fail(n_rows: int) -> None:
        raise RuntimeError("no such stage")

    compiler = compiler_of(warmer)
    found = warmer.warm(FakeRunner("model", [], fail))  # type: ignore[arg-type]
    assert found.notices == ["not compiled: the kernels ahead of their first use (no such stage)"]
    assert not warmer.is_compiling
    assert warmer.max_rows is None
    assert compiler.is_closed
    warmer.close()


def test_a_model_whose_kernels_cannot_be_described_is_loaded(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> gpu.Target:
        raise RuntimeError("unknown GPU")

    monkeypatch.setattr(gpu.Target, "of", staticmethod(fail))
    warmer, backends = make_warmer()
    assert not warmer.compiles_ahead
    assert not warmer.is_compiling
    assert warmer.max_rows is None
    warmer.record_early(backends, [None])
    assert warmer._early is None
    assert "unknown GPU" in warmer.warm_up.notices[0]
    warmer.close()


def test_a_cpu_records_nothing() -> None:
    spec, kind = read_spec(MODEL), get_cache_type("f16")
    config, backends = CacheConfig(kind, kind), [get_backend("auto")]
    split = split_model(spec, read_params(spec), make_crew("cpu"), config, n_ctx=64, rotate=True)
    fit = fit_cache(split, backends, config, n_batch=N_BATCH, n_parallel=N_PARALLEL)
    warmer = KernelWarmer(split, backends, fit.plan, n_batch=N_BATCH, n_parallel=N_PARALLEL)
    assert not warmer.compiles_ahead
    warmer.record_early(backends, [None])
    assert warmer._early is None
    assert stand_in_runner(split, backends, fit.plan, [None]) is None
    with pytest.raises(AssertionError, match="no stand-ins"):
        backends[0].weight_like(split.graph(BatchShape(1, 1)).weights[0])


def test_recording_begins_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    runner = assembly.Runner

    before = sys.getswitchinterval()

    def make_runner(*args: Any, **options: Any) -> Any:
        assert sys.getswitchinterval() < before  # threads share Python's lock
        said.append("weights")
        return runner(*args, **options)

    monkeypatch.setattr(KernelWarmer, "record_early", lambda *_: said.append("record"))
    monkeypatch.setattr(compile_process, "dismiss", lambda: said.append("dismiss"))
    monkeypatch.setattr(assembly, "Runner", make_runner)
    with motley.LLM(n_ctx=64, devices="cpu"):
        assert said == ["record", "dismiss", "weights"]
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize(
    ("devices", "mode", "recorded", "n_layers"),
    [
        ("cpu", None, (0,), 1),
        ("cpu,cpu", "tensor", (0,), 1),
        ("cpu,cpu", "layer", (0,), 0),  # each has four of eight layers, and hands over after its last
        ("cpu,cpu", "layer", (0, 1), 0),
    ],
)
def test_as_many_layers_are_recorded_as_contain_all_kernels(
    devices: str, mode: str | None, recorded: tuple[int, ...], n_layers: int
) -> None:
    spec, kind = read_spec(MODEL), get_cache_type("f16")
    crew = make_crew(devices, mode)
    split = split_model(spec, read_params(spec), crew, CacheConfig(kind, kind), n_ctx=64, rotate=True)
    assert layers_to_record(split, recorded) == n_layers


def test_two_models_that_are_loaded_at_once_leave_the_interval_as_it_was() -> None:
    before = sys.getswitchinterval()
    first, second = assembly._sharing_python(), assembly._sharing_python()
    with first, second:
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before
    first, second = assembly._sharing_python(), assembly._sharing_python()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # the other one is still being loaded
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before
