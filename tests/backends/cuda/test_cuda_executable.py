"""A small model by stages under Triton's interpreter, against the reference backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from cuda_models import DIM, SIZE, inputs_of, make_batch, make_spec, use_few_programs

from motley.backends import ReferenceBackend
from motley.backends.cuda import steps
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.footprint import RESERVE, workspace_bytes
from motley.formats import PackedTensor
from motley.graph import CACHE, Graph
from motley.kvcache.arena import Arena, GroupBatch, LayerGroup
from motley.kvcache.types import CacheType, get_cache_type
from motley.models import BatchShape, GraphOptions, build_graph, read_params
from motley.plan import (
    AttentionBlock,
    DevicePlan,
    Gate,
    Linear,
    Norm,
    Single,
    Stage,
    activation_bytes,
)


def filled_arena(kind: CacheType, batch: GroupBatch) -> Arena:
    """One with random contexts."""
    arena = Arena(kind, kind, [LayerGroup((0,), (1,), 8)], block_size=SIZE, head_dim=DIM)
    past = torch.cat([table.slots(SIZE) for table in batch.tables])
    noise = torch.randn(2, len(past), 1, DIM, generator=torch.Generator().manual_seed(5))
    layer = arena.layer(0)
    layer.keys.write(layer.rows, past, noise[0])
    layer.values.write(layer.rows, past, noise[1])
    return arena


def run(
    backend: Any,
    graph: Graph,
    weights: dict[str, PackedTensor],
    arena: Arena,
    batch: GroupBatch,
    rows: list[int],
) -> torch.Tensor:
    loaded = {name: backend.load(weight) for name, weight in weights.items()}
    loaded["token_embd.weight"] = weights["token_embd.weight"]  # as the runtime leaves it, in the file
    runnable = backend.prepare(DevicePlan.of(graph, backend.kernels), loaded)
    arena.prepare([batch], [])
    layers = {node.name: arena.layer(0).on(batch) for node in graph.inputs if node.dtype == CACHE}
    (logits,) = runnable.run(inputs_of(batch, rows) | layers)
    return logits.clone()


def small_graph(
    matrices: str, kind: CacheType, shape: BatchShape, rotation: int = DIM
) -> tuple[Graph, dict[str, PackedTensor]]:
    spec, weights = make_spec(matrices)
    rotation = rotation if kind.is_quantized else 0
    options = GraphOptions(128, k_rotation=rotation, v_rotation=rotation)
    return build_graph(spec, read_params(spec), shape, options), weights


@pytest.mark.parametrize(
    ("matrices", "cache", "rotation", "contexts", "new"),
    [
        ("Q4_0", "q8_0", DIM, [20], [1]),
        ("Q8_0", "f16", DIM, [9, 21], [1, 1]),
        ("F16", "q4_0", DIM // 2, [6, 17], [5, 1]),  # a sequence with a few rows beside one that decodes
        ("F16", "q4_0", DIM // 2, [30, 17], [19, 1]),  # with many
    ],
)
def test_a_model_by_stages_gives_the_reference_s_logits(
    matrices: str,
    cache: str,
    rotation: int,
    contexts: list[int],
    new: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_few_programs(monkeypatch)
    kind = get_cache_type(cache)
    graph, weights = small_graph(matrices, kind, BatchShape(sum(new), 1), rotation)
    batch = make_batch(contexts, new)
    expected, got = (
        run(backend, graph, weights, filled_arena(kind, batch), batch, [sum(new) - 1])
        for backend in (ReferenceBackend(), CudaBackend("cpu"))
    )
    assert float((got - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("matrices", ["Q8_0", "F16"])
def test_a_batch_without_outputs_is_computed(matrices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all but the last part of a long prompt: its keys and values are kept."""
    use_few_programs(monkeypatch)
    kind, batch = get_cache_type("f16"), make_batch([9], [5])
    graph, weights = small_graph(matrices, kind, BatchShape(5, 0))
    arenas = [filled_arena(kind, batch) for _ in range(2)]
    for backend, arena in zip((ReferenceBackend(), CudaBackend("cpu")), arenas, strict=True):
        assert run(backend, graph, weights, arena, batch, []).shape[0] == 0
    slots = batch.tables[0].slots(SIZE)[-5:]
    expected, got = (arena.layer(0).keys.read(arena.layer(0).rows, slots) for arena in arenas)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_logits_are_soft_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    kind, batch = get_cache_type("f16"), make_batch([20], [1])
    spec, weights = make_spec("F16")
    params = replace(read_params(spec), logit_softcap=0.5)
    graph = build_graph(spec, params, BatchShape(1, 1), GraphOptions(128))
    expected, got = (
        run(backend, graph, weights, filled_arena(kind, batch), batch, [0])
        for backend in (ReferenceBackend(), CudaBackend("cpu"))
    )
    assert 0.3 < expected.abs().max() < 0.5
    assert float((got - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize(
    ("matrices", "contexts", "new"),
    [("F16", [9, 21, 4], [1, 1, 1]), ("F16", [6, 17], [2, 1]), ("F16", [13, 17], [9, 1])],
)
def test_rows_that_pad_a_batch_change_nothing(
    matrices: str, contexts: list[int], new: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_few_programs(monkeypatch)
    kind, batch = get_cache_type("q8_0"), make_batch(contexts, new)
    logits, arenas = [], []
    for shape in (BatchShape(sum(new), 2), BatchShape(sum(new) + 1, 4)):
        graph, weights = small_graph(matrices, kind, shape)
        arenas.append(filled_arena(kind, batch))
        logits.append(run(CudaBackend("cpu"), graph, weights, arenas[-1], batch, [1, 2]))
    assert logits[1].shape[0] == 4
    assert torch.equal(logits[1][:2], logits[0])
    planes, padded = (arena.layer(0).values.planes for arena in arenas)
    assert all(torch.equal(planes[name], padded[name]) for name in planes)


def test_two_models_on_one_backend_keep_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and one that drafts for it have the same names of weights."""
    use_few_programs(monkeypatch)
    kind, batch = get_cache_type("f16"), make_batch([9], [1])
    graph, weights = small_graph("Q8_0", kind, BatchShape(1, 1))
    others = {
        name: PackedTensor.pack(weight.unpack().flip(-1), weight.format) for name, weight in weights.items()
    }
    shared = CudaBackend("cpu")
    logits = []
    for own in (weights, others):
        expected = run(CudaBackend("cpu"), graph, own, filled_arena(kind, batch), batch, [0])
        logits.append(run(shared, graph, own, filled_arena(kind, batch), batch, [0]))
        assert torch.equal(logits[-1], expected)
    assert not torch.equal(logits[0], logits[1])


def test_copies_of_matrices_give_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    monkeypatch.setattr(steps, "MIN_COPY_ROWS", 2)
    kind, batch = get_cache_type("f16"), make_batch([9, 21], [1, 1])
    graph, weights = small_graph("Q8_0", kind, BatchShape(2, 2))
    backend, with_copies = CudaBackend("cpu"), CudaBackend("cpu")
    with_copies.copies.is_kept = True
    expected = run(backend, graph, weights, filled_arena(kind, batch), batch, [0, 1])
    monkeypatch.setattr(steps.matmul_kernel, "matmul", Mock(side_effect=AssertionError("by packed weights")))
    got = run(with_copies, graph, weights, filled_arena(kind, batch), batch, [0, 1])
    assert float((got - expected).norm() / expected.norm()) < 5e-3


def test_buckets_hold_what_they_are_for_and_are_few() -> None:
    bucket = CudaBackend("cpu").bucket
    assert [bucket(n) for n in (0, 1, 2, 3, 5, 16, 17, 64, 65, 500, 512, 513)] == [
        0, 1, 2, 4, 8, 16, 32, 64, 80, 512, 512, 576,
    ]  # fmt: skip
    assert all(n <= bucket(n) < 1.15 * n + 16 for n in range(1, 3000))
    assert len({bucket(n) for n in range(1, 2049)}) < 50


def test_prompts_have_few_numbers_of_outputs() -> None:
    backend = CudaBackend("cpu")
    assert [backend.output_bucket(2048, n) for n in (0, 1, 2, 16, 17, 64, 65, 128, 300)] == [
        0, 1, 16, 16, 64, 64, 128, 128, 320,
    ]  # fmt: skip
    assert [backend.output_bucket(n, n) for n in (1, 3, 100, 256)] == [1, 4, 112, 256]


def stages_of(graph: Graph) -> tuple[Stage, ...]:
    return DevicePlan.of(graph, CudaBackend("cpu").kernels).stages


def test_stages_of_a_layer() -> None:
    graph, _ = small_graph("Q8_0", get_cache_type("q8_0"), BatchShape(1, 1))
    layer = [Norm, Linear, AttentionBlock, Linear, Norm, Linear, Gate, Linear]
    embedding, *others = stages_of(graph)
    assert isinstance(embedding, Single)
    assert [type(stage) for stage in others] == [*layer, Norm, Linear]


def test_the_workspace_holds_the_matrices_that_are_unpacked_at_once() -> None:
    graph, _ = small_graph("Q8_0", get_cache_type("f16"), BatchShape(1, 1))
    at_once = [
        sum(part.weight.n_values for part in stage.parts)
        for stage in stages_of(graph)
        if isinstance(stage, Linear)
    ]
    assert max(at_once) > max(weight.n_values for weight in graph.weights)
    assert workspace_bytes(graph) == RESERVE + 4 * max(at_once)  # while they are repacked
    graph, _ = small_graph("Q8_0", get_cache_type("f16"), BatchShape(256, 1))
    in_graphs = 2 * max(at_once) + 2 * activation_bytes(graph)
    assert workspace_bytes(graph) == RESERVE + 2 * max(at_once) + in_graphs  # while they run
