"""GPUs of workers are planned by what the workers say of them: rank 0 needs neither a GPU nor Triton."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker_process import WorkerProcess

from motley import LLM
from motley.backends import DeviceOffer, backend_for
from motley.bench import random_model, write_random_model
from motley.bench.shapes import Shape
from motley.errors import DeviceError, MotleyError
from motley.runtime import make_crew
from motley.runtime.hosts import offers

PROGRAM = str(Path(__file__).parent / "gpu_worker.py")
TINY = Shape(2, 64, 64, 2, 1, 32, 64, n_ctx=256)
TOKENS = [(7 * i * i + 3) % 60 for i in range(20)]
OPTIONS: dict[str, Any] = {"n_ctx": 64, "n_parallel": 2, "n_batch": 18, "n_threads": 1}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "SHAPES", {"tiny": TINY})
        write_random_model(path, "tiny", "Q8_0")
    return path


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[WorkerProcess]:
    """A worker with an interpreted GPU of some bytes."""
    n_bytes = getattr(request, "param", 4 << 30)
    found = WorkerProcess(
        program=[PROGRAM], variables={"TRITON_INTERPRET": "1", "FAKE_GPU_BYTES": str(n_bytes)}
    )
    yield found
    found.kill()


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process can import neither Triton nor the modules that use it."""
    used = [name for name in sys.modules if name.startswith("motley.backends.cuda.kernels")]
    for name in ("triton", "motley.backends.cuda.backend", "motley.backends.gpu", *used):
        monkeypatch.setitem(sys.modules, name, None)


@needs_triton
def test_a_workers_gpu_needs_no_triton_on_rank_0(tiny: Path, worker: WorkerProcess, no_triton: None) -> None:
    with pytest.raises(DeviceError, match="needs Triton"):
        backend_for("cuda:0", "auto")
    with LLM(tiny, backend="reference", **OPTIONS) as llm:
        expected = torch.from_numpy(llm.logits(TOKENS))
    with LLM(tiny, devices=f"cpu,cuda:0@{worker.address}", **OPTIONS) as llm:
        assert llm._loaded.runner._backends[1].is_remote
        found = torch.from_numpy(llm.logits(TOKENS))
        text = llm.generate([TOKENS], max_tokens=3, temperature=0, ignore_eos=True)[0].tokens
        assert [each["kv_cache"] > 0 for each in llm._loaded.runner.memory()] == [True, True]
    assert len(text) == 3
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.1  # int8 activations


@needs_triton
@pytest.mark.parametrize("worker", [600 << 20], indirect=True)
def test_what_fits_on_a_gpu_is_what_its_worker_has(
    tiny: Path, worker: WorkerProcess, no_triton: None
) -> None:
    crew = f"cuda:0@{worker.address}"
    with LLM(tiny, devices=crew, **OPTIONS) as llm:  # 512 MiB are for libraries
        room = llm._loaded.fit.room[1]
        assert room is not None
        assert 0 < room < 88 << 20
    with pytest.raises(MotleyError, match=f"{crew} has 600.0 MiB free") as caught:
        LLM(tiny, devices=crew, **(OPTIONS | {"n_batch": 1 << 16, "n_parallel": 1 << 16}))
    assert "missing" in str(caught.value)


def answer(monkeypatch: pytest.MonkeyPatch, given: object) -> Any:
    """The crew of a worker that says `given` of its devices."""
    monkeypatch.setattr(offers, "ask_devices", lambda host, secret: {"offers": given})
    return offers.with_offers(make_crew("cpu,cuda:1@10.0.0.2"), b"")


FINE = {"memory": 5, "has_trees": True, "refusal": ""}


def test_offers_of_workers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = answer(monkeypatch, {"cpu": {}, "cuda:1": FINE})
    assert crew.devices[0].remote_offer is None
    assert crew.devices[1].remote_offer == DeviceOffer(5, True)
    backend = backend_for("cuda:1", "auto", crew.devices[1].remote_offer)
    assert backend.is_remote
    assert backend.has_trees
    assert backend.free_bytes() == 5
    assert make_crew("cuda:1@10.0.0.2").devices[1].remote_offer == DeviceOffer()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "does not say"),
        ([], "does not say"),
        ({"cpu": {}}, "10.0.0.2:29400 has no device 'cuda:1'"),
        ({"cuda:1": 7}, "cannot be right"),
        ({"cuda:1": FINE | {"memory": -1}}, "cannot be right"),
        ({"cuda:1": FINE | {"memory": 2**80}}, "cannot be right"),
        ({"cuda:1": FINE | {"has_trees": "yes"}}, "cannot be right"),
        ({"cuda:1": FINE | {"refusal": "needs Triton"}}, "cuda:1@10.0.0.2:29400: needs Triton"),
    ],
)
def test_offers_that_cannot_be_right_are_refused(
    given: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError, match=reason):
        answer(monkeypatch, given)


def test_a_worker_says_why_a_gpu_cannot_be_used(monkeypatch: pytest.MonkeyPatch, no_triton: None) -> None:
    monkeypatch.setattr(offers, "known_devices", lambda: ("cpu", "cuda:0"))
    monkeypatch.setattr(offers, "usable_bytes", lambda gpu: 1 << 30)
    own = offers.own_offers()
    assert own["cpu"]["has_trees"]
    assert own["cpu"]["memory"] > 0
    assert "needs Triton" in own["cuda:0"]["refusal"]


def test_the_context_is_chosen_by_the_memory_of_the_smallest_host(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from motley.gguf import read_spec
    from motley.kvcache.types import get_cache_type
    from motley.models import read_params
    from motley.runtime import CacheConfig, defaults, split_model
    from motley.runtime.crew import Crew

    monkeypatch.setattr(defaults, "host_bytes", lambda: 1 << 40)
    spec = read_spec(tiny)
    cache, params = (
        CacheConfig(get_cache_type("f16"), get_cache_type("f16"), block_size=16),
        read_params(spec),
    )

    def chosen(crew: Crew) -> int:
        backends = [backend_for(device.name, "reference") for device in crew.devices]
        return defaults.choose_context(
            None,
            lambda n_ctx: split_model(spec, params, crew, cache, n_ctx=n_ctx, rotate=False),
            params,
            backends,
            cache,
            n_batch=16,
            n_parallel=1,
        ).n_ctx

    crew = make_crew("cpu,cpu@10.0.0.2")
    assert chosen(crew) == params.n_ctx_train
    monkeypatch.setattr(
        offers, "ask_devices", lambda host, secret: {"offers": {"cpu": FINE | {"memory": 100_000}}}
    )
    assert np.array_equal(chosen(offers.with_offers(crew, b"")), 100_000 // 16 // (16 * 128) * 16)
