"""A small gpt-oss on the GPU's kernels, under Triton's interpreter: sinks, biases, clamped SwiGLU, MXFP4 experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cuda_models import SIZE, inputs_of, make_batch, use_few_programs

from motley.backends import ReferenceBackend
from motley.backends.base import Backend
from motley.backends.cuda.backend import CudaBackend
from motley.formats import PackedTensor, get_format
from motley.gguf import ModelSpec
from motley.gguf.metadata import Metadata
from motley.gguf.tensors import TensorInfo
from motley.graph import CACHE, Graph
from motley.kvcache.arena import Arena, GroupBatch, LayerGroup
from motley.kvcache.types import get_cache_type
from motley.models import BatchShape, GraphOptions, build_graph, read_params
from motley.plan import AttentionBlock, DevicePlan, Experts

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

EMBD, DIM, HEADS, KV_HEADS, FF, EXPERTS, VOCAB = 64, 32, 4, 2, 64, 6, 40


def small_gpt_oss() -> tuple[ModelSpec, dict[str, PackedTensor]]:
    """One layer, with a window that is longer than the contexts."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, EMBD),
        "output_norm.weight": (EMBD,),
        "output.weight": (VOCAB, EMBD),
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (EMBD,),
        "post_attention_norm.weight": (EMBD,),
        "attn_sinks.weight": (HEADS,),
        "ffn_gate_inp.weight": (EXPERTS, EMBD),
        "ffn_gate_inp.bias": (EXPERTS,),
        "ffn_gate_exps.weight": (EXPERTS, FF, EMBD),
        "ffn_up_exps.weight": (EXPERTS, FF, EMBD),
        "ffn_down_exps.weight": (EXPERTS, EMBD, FF),
        "ffn_gate_exps.bias": (EXPERTS, FF),
        "ffn_up_exps.bias": (EXPERTS, FF),
        "ffn_down_exps.bias": (EXPERTS, EMBD),
    }
    for part, n, inside in (("q", HEADS, EMBD), ("k", KV_HEADS, EMBD), ("v", KV_HEADS, EMBD)):
        layer |= {f"attn_{part}.weight": (n * DIM, inside), f"attn_{part}.bias": (n * DIM,)}
    layer |= {"attn_output.weight": (EMBD, HEADS * DIM), "attn_output.bias": (EMBD,)}
    shapes |= {f"blk.0.{name}": shape for name, shape in layer.items()}
    numbers: dict[str, Any] = {
        "block_count": 1,
        "embedding_length": EMBD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": DIM,
        "attention.value_length": DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 128,
        "feed_forward_length": FF,
        "context_length": 128,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": FF,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for name, shape in shapes.items():
        is_vector = len(shape) == 1 or name.endswith(".bias")
        scale = 1.0 if is_vector else shape[-1] ** -0.5
        values = torch.randn(shape, generator=generator) * scale + (1.0 if "norm" in name else 0.0)
        form = "F32" if is_vector or "gate_inp" in name else "MXFP4" if "exps" in name else "Q8_0"
        weights[name] = PackedTensor.pack(values, get_format(form))
    infos = {
        name: TensorInfo(name, weight.shape, weight.format.name, weight.nbytes, 0, 0)
        for name, weight in weights.items()
    }
    metadata = {"general.architecture": "gpt-oss"} | {f"gpt-oss.{key}": v for key, v in numbers.items()}
    return ModelSpec(Path("small"), Metadata(metadata, Path("small")), infos, ()), weights


def run(backend: Backend, graph: Graph, weights: dict[str, PackedTensor], batch: GroupBatch) -> torch.Tensor:
    kind = get_cache_type("f16")
    arena = Arena(kind, kind, [LayerGroup((0,), (KV_HEADS,), 8)], block_size=SIZE, head_dim=DIM)
    layer = arena.layer(0)
    generator = torch.Generator().manual_seed(5)
    for store in (layer.keys, layer.values):
        slots = torch.arange(8 * SIZE)
        store.write(layer.rows, slots, torch.randn(len(slots), KV_HEADS, DIM, generator=generator))
    loaded = {name: backend.load(weight) for name, weight in weights.items()}
    loaded["token_embd.weight"] = weights["token_embd.weight"]
    runnable = backend.prepare(DevicePlan.of(graph, backend.kernels), loaded)
    arena.prepare([batch], [])
    layers = {node.name: arena.layer(0).on(batch) for node in graph.inputs if node.dtype == CACHE}
    n_tokens = len(batch.slots)
    used = {"n_expert_used": torch.full((n_tokens,), 2, dtype=torch.int32)}
    (logits,) = runnable.run(inputs_of(batch, [n_tokens - 1]) | layers | used)
    return logits.clone()


@pytest.mark.parametrize(("contexts", "new"), [([20], [1]), ([30, 17], [11, 1])])
def test_logits_are_those_of_the_reference(
    contexts: list[int], new: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_few_programs(monkeypatch)
    spec, weights = small_gpt_oss()
    batch = make_batch(contexts, new)
    graph = build_graph(spec, read_params(spec), BatchShape(sum(new), 1), GraphOptions(128))
    expected, got = (
        run(backend, graph, weights, batch) for backend in (ReferenceBackend(), CudaBackend("cpu"))
    )
    assert float((got - expected).norm() / expected.norm()) < 2e-2  # activations of 8 bits


def test_attention_with_sinks_and_experts_with_biases_have_kernels() -> None:
    spec, _ = small_gpt_oss()
    graph = build_graph(spec, read_params(spec), BatchShape(2, 1), GraphOptions(128))
    steps = DevicePlan.of(graph, CudaBackend("cpu").kernels).steps
    assert any(isinstance(step.stage, AttentionBlock) for step in steps)
    assert [step.kernel.name for step in steps if isinstance(step.stage, Experts)] == ["cuda"]
