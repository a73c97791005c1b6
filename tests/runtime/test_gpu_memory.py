"""A GPU's free memory decides before anything is loaded, on a GPU that only says how much it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from motley.assembly import Options, _plan_on_crew
from motley.backends import Backend, backend_for
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.footprint import RESERVE, copied_bytes, stored_bytes, workspace_bytes
from motley.backends.cuda.weights import load
from motley.bundled import bundled_experts_path, bundled_model_path
from motley.errors import DeviceError
from motley.formats import PackedTensor, get_format
from motley.gguf import read_spec
from motley.graph.ops import Weight
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, GraphOptions, build_graph, read_params
from motley.plan import activation_bytes
from motley.runtime import CacheConfig, CacheFit, ModelSplit, fit_cache, make_crew, split_model
from motley.runtime.budget import device_needs
from motley.runtime.defaults import chosen_crew

F16 = get_cache_type("f16")
GIB = 1 << 30


def backends_of(split: ModelSplit) -> list[Backend]:
    return [backend_for(device.name, "auto") for device in split.crew.devices]


def fit(path: Path, n_ctx: int = 4096, **crew: str) -> CacheFit:
    spec = read_spec(path)
    config = CacheConfig(F16, F16)
    split = split_model(spec, read_params(spec), make_crew(**crew), config, n_ctx=n_ctx, rotate=False)
    return fit_cache(split, backends_of(split), config, n_batch=64, n_parallel=8)


def needs_of(path: Path, **crew: str) -> list[int]:
    spec = read_spec(path)
    config = CacheConfig(F16, F16)
    split = split_model(spec, read_params(spec), make_crew(**crew), config, n_ctx=4096, rotate=False)
    return [need.total for need in device_needs(split, backends_of(split), BatchShape(64, 64))]


@pytest.fixture
def path(random_llama: Path) -> Path:
    return random_llama


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Set `free["bytes"]`: what the one GPU has free. Of it, torch has kept a tenth for later."""
    memory = {"bytes": 100 * GIB}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda device: (memory["bytes"] - memory["bytes"] // 10, 140 * GIB),
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: memory["bytes"] // 10 + 123)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 123)
    return memory


def test_the_cache_takes_what_the_gpu_has_left(path: Path, free: dict[str, int]) -> None:
    whole = fit(path, devices="cuda").plan
    (need,) = needs_of(path, devices="cuda")
    free["bytes"] = need + whole.n_bytes(0) // 2
    half = fit(path, devices="cuda")
    assert half.room == (whole.n_bytes(0) // 2,)
    assert 0.4 * whole.n_bytes(0) < half.plan.n_bytes(0) <= whole.n_bytes(0) // 2


def test_a_model_that_does_not_fit_is_refused_with_numbers(path: Path, free: dict[str, int]) -> None:
    (need,) = needs_of(path, devices="cuda")
    free["bytes"] = need - 5 * 1024**2
    with pytest.raises(DeviceError, match=r"cuda:0 has .* free: 5\.0 MiB are missing.*needs .* for weights"):
        fit(path, devices="cuda")


def test_virtual_devices_share_their_gpu_s_memory(path: Path, free: dict[str, int]) -> None:
    crew = {"devices": "cuda:0,cuda:0", "split_mode": "tensor"}
    needs = needs_of(path, **crew)
    free["bytes"] = sum(needs) + 10_000_000
    assert fit(path, **crew).room == (5_000_000, 5_000_000)
    free["bytes"] = sum(needs) - 1  # enough for each, not for both
    with pytest.raises(DeviceError, match=r"cuda:0#0 needs .*; cuda:0#1 needs"):
        fit(path, **crew)


def test_a_budget_is_not_more_than_there_is(path: Path, free: dict[str, int]) -> None:
    (need,) = needs_of(path, devices="cuda")
    free["bytes"] = need + 2_000_000
    assert fit(path, devices="cuda", device_memory=str(need + 1_500_000)).room == (1_500_000,)
    assert fit(path, devices="cuda", device_memory="90GiB").room == (2_000_000,)


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,cpu", "auto"])
def test_experts_that_do_not_fit_are_on_the_cpu(free: dict[str, int], devices: str) -> None:
    """The plan only: nothing is loaded."""
    path = bundled_experts_path()
    spec = read_spec(path)
    params = read_params(spec)
    options = Options(CacheConfig(F16, F16), n_ctx=64, n_batch=16, n_parallel=1, devices=devices)
    (need,) = needs_of(path, devices="cuda")

    def planned() -> ModelSplit:
        crew, _ = chosen_crew(devices, None, None, None)
        return _plan_on_crew(crew, spec, params, options).context.split

    free["bytes"] = 2 * need
    whole = planned().crew
    n_apart = 0 if whole.apart is None else whole.apart.n_layers
    assert n_apart == 0
    free["bytes"] = need - 3 * 1024**2  # experts of a layer have 1.2 MiB
    less = planned()
    assert [device.name for device in less.crew.devices] == ["cuda:0", "cpu"]
    assert less.crew.apart is not None
    assert 0 < (less.crew.apart.n_layers or 0) < params.n_layers
    assert less.crew.shares[1] == 0
    with pytest.raises(DeviceError, match="cuda:0 has"):  # the user wants it otherwise
        _plan_on_crew(make_crew("cuda:0"), spec, params, replace(options, n_cpu_moe=0))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "Q5_K", "F32"])
def test_weights_count_as_they_lie_on_the_gpu(kind: str) -> None:
    weight = PackedTensor.pack(torch.randn(3, 512), get_format(kind))
    node = Weight((3, 512), kind, "w")(name="w")
    assert stored_bytes(node) == load(weight, torch.device("cpu")).nbytes


def test_slots_of_experts_count_if_they_take_more_than_loading() -> None:
    spec = read_spec(bundled_experts_path())
    params = read_params(spec)
    few_rows, many_rows = (build_graph(spec, params, BatchShape(n, 1), GraphOptions(64)) for n in (1, 4096))
    few, many = workspace_bytes(few_rows), workspace_bytes(many_rows)
    n_slots, n_embd, n_ff = 4096 * 4, 256, 96
    in_graphs = n_slots * (6 * n_ff + 8 * n_embd) + 2 * activation_bytes(many_rows)
    assert many - RESERVE == n_slots * (6 * n_ff + 8 * n_embd) + in_graphs
    assert RESERVE < few < many


def test_half_of_the_spare_memory_is_used_for_copies() -> None:
    spec = read_spec(bundled_model_path())
    graph = build_graph(spec, read_params(spec), BatchShape(1, 1), GraphOptions(64))
    n_bytes = copied_bytes(graph)
    matrices = [w for w in graph.weights if len(w.shape) == 2 and w.name != "token_embd.weight"]
    assert n_bytes >= 2 * sum(weight.n_values for weight in matrices)
    backend = CudaBackend("cpu")
    cases = (
        (-5, 128, False),
        (2 * n_bytes - 2, 128, False),
        (2 * n_bytes, 128, True),
        (2**40, 32, False),
        (2**40, 33, True),
    )
    for spare, max_decodes, is_kept in cases:
        backend.offer_spare(spare, graph, max_decodes)
        assert backend.kernel_variant is is_kept
        assert bool(backend.details) is is_kept
