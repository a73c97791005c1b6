"""A small model by stages under Triton's interpreter, against the reference backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from motley.backends import ReferenceBackend
from motley.backends.cuda.backend import CudaBackend
from motley.backends.cuda.kernels import attention, matvec
from motley.backends.cuda.lowering import Attend, Embed, Gate, Linear, Lowering, Norm, Single
from motley.formats import PackedTensor, get_format
from motley.gguf import ModelSpec
from motley.gguf.metadata import Metadata
from motley.gguf.tensors import TensorInfo
from motley.graph import CACHE, Graph
from motley.kvcache.arena import Arena, GroupBatch, LayerGroup, SequenceTable
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, GraphOptions, build_graph, read_params
from motley.plan import DevicePlan

EMBD, HEADS, KV_HEADS, DIM, FF, VOCAB, SIZE = 128, 2, 1, 64, 256, 40, 16


def make_spec(matrices: str) -> tuple[ModelSpec, dict[str, PackedTensor]]:
    """A llama of one layer, without a file."""
    shapes = {
        "token_embd.weight": (VOCAB, EMBD),
        "output_norm.weight": (EMBD,),
        "output.weight": (VOCAB, EMBD),
        "blk.0.attn_norm.weight": (EMBD,),
        "blk.0.ffn_norm.weight": (EMBD,),
        "blk.0.attn_q.weight": (HEADS * DIM, EMBD),
        "blk.0.attn_k.weight": (KV_HEADS * DIM, EMBD),
        "blk.0.attn_v.weight": (KV_HEADS * DIM, EMBD),
        "blk.0.attn_output.weight": (EMBD, HEADS * DIM),
        "blk.0.ffn_gate.weight": (FF, EMBD),
        "blk.0.ffn_up.weight": (FF, EMBD),
        "blk.0.ffn_down.weight": (EMBD, FF),
    }
    numbers: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.embedding_length": EMBD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.feed_forward_length": FF,
        "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: PackedTensor.pack(
            torch.rand(shape, generator=generator) + 0.5
            if len(shape) == 1
            else torch.randn(shape, generator=generator) * shape[-1] ** -0.5,
            get_format("F32" if len(shape) == 1 else matrices),
        )
        for name, shape in shapes.items()
    }
    infos = {
        name: TensorInfo(name, weight.shape, weight.format.name, weight.nbytes, 0, 0)
        for name, weight in weights.items()
    }
    return ModelSpec(Path("small"), Metadata(numbers, Path("small")), infos, ()), weights


def make_batch(n_contexts: list[int], n_new: list[int]) -> GroupBatch:
    """Sequences with `n_contexts` tokens in the cache, the last `n_new` of which are the batch's."""
    tables, row = [], 0
    for number, (n, new) in enumerate(zip(n_contexts, n_new, strict=True)):
        blocks = np.arange(-(-n // SIZE), dtype=np.int32) + 4 * (len(n_contexts) - 1 - number)
        tables.append(SequenceTable(row, new, n - new, 0, blocks))
        row += new
    return GroupBatch.of(tables, SIZE)


def run(
    backend: Any, graph: Graph, weights: dict[str, PackedTensor], arena: Arena, batch: GroupBatch
) -> torch.Tensor:
    runnable = backend.prepare(DevicePlan.of(graph, backend.kernels), weights)
    n_tokens = len(batch.slots)
    inputs: dict[str, Any] = {
        "tokens": torch.arange(n_tokens, dtype=torch.int32) + 3,
        "positions": torch.cat(
            [torch.arange(table.position, table.position + table.n_rows) for table in batch.tables]
        ).int(),
        "output_rows": torch.tensor([n_tokens - 1], dtype=torch.int32),
    }
    arena.begin([batch], [])
    inputs |= {node.name: arena.layer(0) for node in graph.inputs if node.dtype == CACHE}
    (logits,) = runnable.run(inputs)
    return logits.clone()


@pytest.mark.parametrize(
    ("matrices", "cache", "contexts", "new"),
    [
        ("Q4_0", "q8_0", [20], [1]),
        ("Q8_0", "f16", [9, 21], [1, 1]),
        ("F16", "q4_0", [6, 17], [5, 1]),  # a sequence with several rows beside one that decodes
    ],
)
def test_a_model_by_stages_gives_the_reference_s_logits(
    matrices: str, cache: str, contexts: list[int], new: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An interpreted program takes its time, however small: few, large ones.
    monkeypatch.setattr(matvec, "tile_for", lambda n_columns: matvec.Tile(256, n_columns // 32, 1))
    monkeypatch.setattr(attention, "TUNINGS", dict.fromkeys(attention.KINDS, attention.Tuning(4)))
    spec, weights = make_spec(matrices)
    kind = get_cache_type(cache)
    rotation = DIM if kind.is_quantized else 0
    graph = build_graph(
        spec,
        read_params(spec),
        BatchShape(sum(new), 1),
        GraphOptions(128, k_rotation=rotation, v_rotation=rotation),
    )
    batch = make_batch(contexts, new)
    results = []
    for backend in (ReferenceBackend(), CudaBackend("cpu")):
        arena = Arena(kind, kind, [LayerGroup((0,), (KV_HEADS,), 8)], block_size=SIZE, head_dim=DIM)
        past = torch.cat([table.slots(SIZE) for table in batch.tables])
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(2, len(past), KV_HEADS, DIM, generator=generator)
        layer = arena.layer(0)
        layer.keys.write(layer.rows, past, noise[0])
        layer.values.write(layer.rows, past, noise[1])
        loaded = {name: backend.load(weight) for name, weight in weights.items()}
        loaded["token_embd.weight"] = weights["token_embd.weight"]  # as the runtime leaves it, in the file
        results.append(run(backend, graph, loaded, arena, batch))
    expected, got = results
    assert float((got - expected).norm() / expected.norm()) < 2e-2


def test_stages_of_a_layer() -> None:
    spec, _ = make_spec("Q8_0")
    options = GraphOptions(128, k_rotation=DIM, v_rotation=DIM)
    graph = build_graph(spec, read_params(spec), BatchShape(1, 1), options)
    kinds = [type(stage) for stage in Lowering(graph).stages if not isinstance(stage, Single)]
    layer = [Norm, Linear, Attend, Linear, Norm, Linear, Gate, Linear]
    assert kinds == [Embed, *layer, Norm, Linear]
