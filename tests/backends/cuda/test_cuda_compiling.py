"""Kernels are compiled before they are needed: the rehearsal meets all of them, and other processes compile them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from random_models import LLAMA

pytest.importorskip("triton")

from cuda_models import use_few_programs
from triton import knobs
from triton.runtime.jit import JITFunction

import motley
from motley.backends import get_backend
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.compiling import Compiled, Manifest, is_recording, recording
from motley.gguf import read_spec
from motley.kvcache.manager import CacheManager
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, read_params
from motley.runtime import CacheConfig, Runner, fit_cache, make_crew, split_model
from motley.runtime.batches_ahead import BatchesAhead
from motley.runtime.group import ThreadGroup
from motley.runtime.rehearsals import inert_batch, rehearsals
from motley.runtime.warm_up import WarmUp
from motley.runtime.warming import KernelWarmer

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

MODEL = Path(motley.__file__).parent / "bundled" / "motley-15m-q8_0.gguf"


def test_a_models_batches_compile_nothing_that_was_not_rehearsed(tmp_path: Path) -> None:
    script = Path(__file__).parent / "rehearse_kernels.py"
    apart = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, script, "and compile"],
        env=os.environ | apart,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-2000:]}"


def test_kernels_are_the_same_in_a_process_without_torch() -> None:
    script = Path(__file__).parent / "kernel_keys.py"
    results = []
    for arguments in ([], ["without torch"]):
        run = subprocess.run(
            [sys.executable, script, *arguments],
            env=os.environ | {"TRITON_INTERPRET": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
        results.append(json.loads(run.stdout))
    (keys, has_torch), (others, still_has_torch) = results
    assert has_torch
    assert not still_has_torch
    assert len(keys) > 50
    assert keys == others


def test_constants_that_name_a_type_stay_strings_in_a_job() -> None:
    """Triton takes "int8" for the type, and keeps the other kernel that this gives under the right one's key."""
    script = Path(__file__).parent / "preload_strings.py"
    run = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == ["int", "str"]


def test_no_kernel_is_launched_while_kernels_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a compiled one: it would read the ids that another kernel, which was not launched, has not written. This
    holds for a crew's own threads, and not for the thread of a model that is at work meanwhile.
    """
    launched: list[bool] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, warmup, **_: launched.append(not warmup))
    kernel = JITFunction(test_no_kernel_is_launched_while_kernels_are_recorded)
    group = ThreadGroup([1, 1])
    with recording({}):
        assert is_recording()
        kernel[(1,)]()
        group.run(lambda _: kernel[(1,)]())
        other = Thread(target=kernel[(1,)])
        other.start()
        other.join(60)
    kernel[(1,)]()
    group.run(lambda _: kernel[(1,)]())
    group.close()
    assert launched == [False, False, False, True, True, True, True]
    assert not is_recording()


@pytest.mark.parametrize(("n_batch", "n_parallel"), [(2048, 128), (512, 1), (4, 8), (1, 1)])
def test_rehearsed_batches_are_no_larger_than_real_ones(n_batch: int, n_parallel: int) -> None:
    shapes = list(rehearsals(n_batch, n_parallel))
    assert all(shape.n_tokens <= n_batch for shape, _ in shapes)
    assert all(
        shape.n_outputs <= max(n_parallel, longest) for shape, longest in shapes
    )  # drafts have outputs
    assert len(set(shapes)) == len(shapes)
    assert (BatchShape(1, 1), 1) in shapes


def test_an_inert_batch_leaves_the_cache_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    spec, kind = read_spec(LLAMA.write(tmp_path / "llama.gguf")), get_cache_type("q8_0")
    config = CacheConfig(kind, kind, block_size=16, max_tokens=64)
    split = split_model(spec, read_params(spec), make_crew("cpu"), config, n_ctx=64, rotate=True)
    fit = fit_cache(split, [get_backend("auto")], config, n_batch=16, n_parallel=2)
    runner = Runner(split, [CudaBackend("cpu")], fit.plan)
    planes = [p for store in _stores(runner) for p in store.planes.values()]
    for plane in planes:
        plane.fill_(3)
    for shape, longest in ((BatchShape(2, 2), 1), (BatchShape(12, 1), 12)):
        logits = runner.run(inert_batch(shape, longest, fit.plan), [0] * shape.n_tokens, ())
        assert logits.shape == (shape.n_outputs, spec.tensors["token_embd.weight"].shape[0])
    assert all(bool((plane == 3).all()) for plane in planes)
    n_plans = runner.n_plans
    sizes = {"n_batch": 12, "n_parallel": 2}
    warmer = KernelWarmer(split, [CudaBackend("cpu")], fit.plan, **sizes)
    ahead = BatchesAhead(warmer, runner, split, fit.plan, CacheManager(fit.plan.group_specs(), 16), **sizes)
    assert ahead.run_first() == 0.0
    assert runner.n_plans == n_plans  # there is no GPU
    warmer.uses_gpus = True
    assert ahead.run_first() > 0.0  # a prompt, which has its plan, and a token
    assert runner.n_plans == n_plans + 1
    assert ahead.draft_rows == (8, 4, 2)  # a batch has at most 12
    ahead.prepare_drafts(4)
    assert runner.n_plans == n_plans + 2
    assert all(bool((plane == 3).all()) for plane in planes)
    runner.close()


def _stores(runner: Runner) -> list[object]:
    return [store for group in runner.local.arenas[0]._groups for store in (group.keys, group.values)]  # type: ignore[misc]


def test_without_a_gpu_nothing_is_compiled() -> None:
    spec, kind = read_spec(MODEL), get_cache_type("f16")
    config = CacheConfig(kind, kind)
    split = split_model(spec, read_params(spec), make_crew("cpu"), config, n_ctx=64, rotate=True)
    fit = fit_cache(split, [get_backend("auto")], config, n_batch=16, n_parallel=2)
    runner = Runner(split, [CudaBackend("cpu")], fit.plan)
    warmer = KernelWarmer(split, [CudaBackend("cpu")], fit.plan, n_batch=16, n_parallel=2)
    assert warmer.warm(runner) == WarmUp()
    runner.close()


def test_a_manifest_is_found_by_what_it_describes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "new"))
    assert not Manifest("a model", 1).exists
    Manifest("a model", 1).write([Compiled("_matmul", 0.8)])
    assert Manifest("a model", 1).exists
    assert not Manifest("a model", 2).exists
    (note,) = (tmp_path / "new").iterdir()
    assert json.loads(note.read_text())["kernels"] == [["_matmul", 0.8]]


def test_what_was_compiled_is_said_in_one_line() -> None:
    assert str(WarmUp()) == "kernels: all compiled before"
    assert str(WarmUp(failures=("all",))) == "kernels: compiled at their first use"
    done = WarmUp((("_a", 1.0), ("_b", 2.5)), 1.26)
    assert str(done) == "kernels: 2 compiled in 1.3 s (4 s of one core)"
