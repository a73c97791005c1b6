"""Prompts as graphs with launches between them: the same logits as by launches alone, for other prompts, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cuda_models import DIM, SIZE, inputs_of, make_batch, make_spec, use_few_programs
from recorded_graphs import RecordingPool, graphs  # noqa: F401  a fixture

from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.executable import CudaExecutable
from motley.backends.cuda.prompt_graphs import PromptGraphs
from motley.graph import CACHE, Graph
from motley.kvcache.arena import Arena, GroupBatch, LayerGroup
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, GraphOptions, build_graph, read_params
from motley.plan import DevicePlan

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

N_ROWS = 20
# Batches of one plan: prompts of one and of two sequences; with a context, beside a decoding request, padded.
BATCHES = [([20], [20]), ([20], [20]), ([17, 3], [17, 3]), ([20, 30], [17, 1])]


def arena() -> Arena:
    kind = get_cache_type("f16")
    arena = Arena(kind, kind, [LayerGroup((0, 1), (1, 1), 8)], block_size=SIZE, head_dim=DIM)
    for layer in (arena.layer(0), arena.layer(1)):
        noise = torch.randn(2, 8 * SIZE, 1, DIM, generator=torch.Generator().manual_seed(5))
        layer.keys.write(layer.rows, torch.arange(8 * SIZE), noise[0])
        layer.values.write(layer.rows, torch.arange(8 * SIZE), noise[1])
    return arena


def prepare(graph: Graph, weights: dict[str, Any]) -> CudaExecutable:
    backend = CudaBackend("cpu")
    loaded: dict[str, Any] = {name: backend.load(weight) for name, weight in weights.items()}
    executable = backend.prepare(DevicePlan.of(graph, backend.kernels), loaded)
    assert isinstance(executable, CudaExecutable)
    return executable


def inputs(graph: Graph, cache: Arena, batch: GroupBatch, first_token: int) -> dict[str, Any]:
    cache.prepare([batch], [])
    layers = {
        node.name: cache.layer(i).on(batch)
        for i, node in enumerate(node for node in graph.inputs if node.dtype == CACHE)
    }
    numbers = inputs_of(batch, [len(batch.slots) - 1])
    return numbers | {"tokens": (numbers["tokens"] + first_token) % 40} | layers


@pytest.mark.slow
def test_replays_give_what_launches_give(
    graphs: RecordingPool,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_few_programs(monkeypatch)
    spec, weights = make_spec("Q8_0", n_layers=2)
    graph = build_graph(spec, read_params(spec), BatchShape(N_ROWS, 1), GraphOptions(128))
    captured = CudaExecutable.join([prepare(graph, weights)])
    assert captured is not None
    caches = arena(), arena()
    kinds = []
    for number, (contexts, new) in enumerate(BATCHES):
        batch = make_batch(contexts, new)
        launched = CudaExecutable.join([prepare(graph, weights)])
        assert launched is not None
        ((expected,),) = launched.run([inputs(graph, caches[0], batch, number)])
        ((got,),) = captured.run([inputs(graph, caches[1], batch, number)])
        torch.testing.assert_close(got, expected)
        kinds.append(type(getattr(captured, "_prompt")))  # noqa: B009
    assert kinds == [type(None)] + [PromptGraphs] * (len(BATCHES) - 1)


@pytest.mark.parametrize("reason", ["fails", "no memory"])
def test_a_prompt_that_cannot_be_captured_is_launched(
    graphs: RecordingPool,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
) -> None:
    use_few_programs(monkeypatch)
    spec, weights = make_spec("Q8_0", n_layers=1)
    graph = build_graph(spec, read_params(spec), BatchShape(N_ROWS, 1), GraphOptions(128))
    run = CudaExecutable.join([prepare(graph, weights)])
    assert run is not None
    cache, results = arena(), []
    if reason == "no memory":
        graphs.n_bytes = 0
    for number in range(3):
        graphs.failures = (
            [RuntimeError("cannot")] if number == 1 else []
        )  # only the second one would be captured
        ((logits,),) = run.run([inputs(graph, cache, make_batch([20], [20]), 0)])
        results.append(logits.clone())
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])
    assert getattr(run, "_prompt") is None  # noqa: B009
    assert len(graphs.failures) == 0
