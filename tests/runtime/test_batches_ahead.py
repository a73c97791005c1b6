"""Batches that run before requests need them, where a CPU takes part: they leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import motley
from motley.backends import get_backend
from motley.errors import DeviceError
from motley.gguf import read_spec
from motley.kvcache.manager import CacheManager
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, read_params
from motley.runtime import CacheConfig, ModelSplit, Runner, fit_cache, make_crew, split_model
from motley.runtime.batch import Batch, Chunk
from motley.runtime.batches_ahead import BatchesAhead
from motley.runtime.caching import CachePlan

MODEL = Path(motley.__file__).parent / "bundled" / "motley-15m-q8_0.gguf"
SIZES = {"n_batch": 64, "n_parallel": 16}
BLOCK = 16


class FakeWarmer:
    """Says that there is a GPU beside a CPU."""

    uses_gpus = has_cpu = True
    max_rows: int | None = None

    def wait_prepared(self) -> None: ...

    def wait_libraries(self) -> None: ...


@dataclass
class Parts:
    split: ModelSplit
    cache: CachePlan
    runner: Runner
    manager: CacheManager
    warmer: FakeWarmer
    ahead: BatchesAhead


@pytest.fixture(params=["cpu", "cpu,cpu"])
def parts(request: pytest.FixtureRequest) -> Iterator[Parts]:
    spec, kind, crew = read_spec(MODEL), get_cache_type("q8_0"), make_crew(request.param)
    config = CacheConfig(kind, kind, block_size=BLOCK, max_tokens=256)
    split = split_model(spec, read_params(spec), crew, config, n_ctx=128, rotate=True)
    backends = [get_backend("auto") for _ in crew.devices]
    fit = fit_cache(split, backends, config, **SIZES)
    runner, manager = Runner(split, backends, fit.plan), CacheManager(fit.plan.group_specs(), BLOCK)
    warmer = FakeWarmer()
    ahead = BatchesAhead(warmer, runner, split, fit.plan, manager, **SIZES)  # type: ignore[arg-type]
    yield Parts(split, fit.plan, runner, manager, warmer, ahead)
    runner.close()


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The rows and outputs of batches that run from now on."""
    ran: list[tuple[int, int]] = []
    run = Runner.run

    def watched(self: Runner, batch: Any, *args: Any) -> Any:
        ran.append((batch.shape.n_tokens, batch.shape.n_outputs))
        return run(self, batch, *args)

    monkeypatch.setattr(Runner, "run", watched)
    return ran


def test_a_first_request_finds_its_plans(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = watch(monkeypatch)
    assert parts.ahead.run_first() > 0.0
    assert ran == [(1, 1)] * 2
    ran.clear()
    parts.warmer.max_rows = 8
    parts.ahead.run_first()
    assert ran == [(8, 1), (1, 1), (1, 1)]
    ran.clear()
    for shape, longest in parts.ahead.later:
        parts.ahead.run_later(shape, longest)
    assert ran == [(8, 8)] * 2 + [(4, 4)] * 2 + [(2, 2)] * 2  # no prompt, which the CPU would compute
    assert parts.ahead.draft_rows == (8, 4, 2)
    ran.clear()
    parts.ahead.prepare_drafts(4)
    assert ran == [(4, 4)] * 2


def test_nothing_is_left_behind(parts: Parts) -> None:
    manager = parts.manager
    free, stats = manager.n_free_tokens, manager.stats()
    parts.warmer.max_rows = 8
    parts.ahead.run_first()
    for shape, longest in parts.ahead.later:
        parts.ahead.run_later(shape, longest)
    parts.ahead.prepare_drafts(8)
    manager.check_integrity()
    assert manager.n_free_tokens == free
    assert manager.stats() == stats
    assert manager.n_evictable == 0
    assert manager.open([0] * 40).n_cached == 0


def test_blocks_of_earlier_requests_are_not_evicted(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, n_tokens = parts.manager, parts.manager.n_free_tokens
    tokens = list(range(n_tokens - BLOCK))
    seq = manager.open(tokens).seq
    assert manager.reserve(seq, len(tokens)) == []
    manager.commit(seq, tokens)
    manager.free(seq)
    n_kept = manager.n_evictable
    ran = watch(monkeypatch)
    parts.ahead.run_later(BatchShape(2, 2), 1)
    assert not ran
    parts.ahead.run_later(BatchShape(1, 1), 1)
    assert ran == [(1, 1)]
    assert manager.n_evictable == n_kept > 0


def test_a_failure_does_not_keep_a_model_from_being_loaded(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise DeviceError("no memory")

    free = parts.manager.n_free_tokens
    monkeypatch.setattr(Runner, "run", fail)
    assert parts.ahead.run_first() == 0.0
    assert "no memory" in caplog.text
    assert parts.manager.n_free_tokens == free
    parts.warmer.has_cpu = False  # type: ignore[misc]
    with pytest.raises(DeviceError):
        parts.ahead.run_first()


def test_logits_after_it_are_those_of_a_new_model(parts: Parts) -> None:
    def logits() -> Any:
        seq = parts.manager.open(find=False).seq
        assert parts.manager.reserve(seq, 5) == []
        batch = parts.runner.place(Batch.of([Chunk(seq, 0, 5, 1)]), parts.manager)
        found = parts.runner.run(batch, [3, 1, 4, 1, 5], ()).clone()
        parts.manager.free(seq, copies_done=False)
        return found

    before = logits()
    parts.ahead.run_first()
    for shape, longest in parts.ahead.later:
        parts.ahead.run_later(shape, longest)
    assert bool((logits() == before).all())
