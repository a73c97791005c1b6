"""Kernels are recorded with stand-ins while weights are loaded; what that leaves over is recorded afterwards."""

from __future__ import annotations

import sys
from threading import Event
from typing import Any

import pytest

pytest.importorskip("triton")

from fake_compiling import (
    MODEL,
    N_BATCH,
    N_PARALLEL,
    N_SHAPES,
    FakeRunner,
    compiler_of,
    make_warmer,
    record_early,
    wait_for_thread,
)

import motley
from motley import assembly, compile_process
from motley.backends import get_backend, gpu
from motley.gguf import read_spec
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, read_params
from motley.runtime import CacheConfig, fit_cache, make_crew, split_model
from motley.runtime.rehearsals import tiers
from motley.runtime.stand_in_runner import stand_in_runner
from motley.runtime.warming import KernelWarmer


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
    compiled_at: list[int] = []
    warmer.warm(
        FakeRunner("model", said),  # type: ignore[arg-type]
        lambda *counts: done.append(counts),
        measure=lambda: compiled_at.append(compiler.n_jobs),
    )
    assert said[N_SHAPES:] == ["model plans 1"]  # nothing is recorded again
    assert compiled_at == [1]  # the first ones are compiled, and others are not begun
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


def test_a_model_that_is_closed_while_kernels_are_compiled_waits_for_no_others(on_a_gpu: None) -> None:
    warmer, _ = make_warmer()
    compiler, wait = compiler_of(warmer), compiler_of(warmer).wait
    warmer.warm(FakeRunner("model", []))  # type: ignore[arg-type]

    def close(n_jobs: int, on_done: object = None) -> list[gpu.Compiled]:
        warmer.close()
        return wait(n_jobs, on_done)

    compiler.wait = close  # type: ignore[method-assign]
    assert warmer.advance()
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
