"""Kernels of crews: of a GPU beside a CPU, and of GPUs of several kinds, each for its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fake_compiling import (
    MODEL,
    N_BATCH,
    N_PARALLEL,
    N_SHAPES,
    FakeCompiler,
    FakeRunner,
    compiler_of,
    make_warmer,
    wait_for_thread,
)

from motley.backends import gpu
from motley.compile_process import n_cores
from motley.gguf import read_spec
from motley.kvcache.types import get_cache_type
from motley.models import read_params
from motley.runtime import CacheConfig, make_crew, split_model, warming
from motley.runtime.rehearsals import tiers
from motley.runtime.stand_in_runner import layers_to_record
from motley.runtime.warming import KernelWarmer
from motley.split.lent_layers import LentLayers


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


def test_workers_run_all_layers_of_recorded_batches(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compile what they launch. Their first device may be the crew's: the logits are on ours."""
    warmer, _ = make_warmer("cpu@a,cpu", ["cuda:0", "cuda:0"])
    sampled: list[torch.Tensor] = []
    monkeypatch.setattr(warming, "rehearse_sampling", sampled.append)
    monkeypatch.setattr(warming, "layers_to_record", lambda *_: 1)  # of this process's devices
    n_layers: set[int] = set()
    runner = FakeRunner("model", [])
    record = runner.record

    def note(batch: Any, devices: tuple[int, ...], lends: bool | None) -> torch.Tensor:
        n_layers.add(batch.shape.n_layers)
        return record(batch, devices, lends)

    runner.record = note  # type: ignore[method-assign]
    warmer.warm(runner)  # type: ignore[arg-type]
    assert n_layers == {0}
    assert len(sampled) == len(tiers(N_BATCH, N_PARALLEL)[-1].shapes)
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
