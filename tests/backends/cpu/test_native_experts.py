"""Experts on the native kernels: any distribution of tokens over experts, whole models, crews."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_driver import INSTRUCTION_SETS, CpuBackend, ExactCpuBackend, run_op
from numpy.typing import NDArray

from motley import LLM
from motley.formats import FORMATS, PackedTensor
from motley.graph.ops import SOFTMAX, ExpertFfn, Route
from motley.models import BatchShape
from motley.quality.divergence import RowDivergence

N_EXPERTS, N_EMBD, N_FF = 6, 64, 96
WITH_EXPERTS = ("glm4moe", "gpt-oss", "qwen3moe", "qwen3vlmoe")


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids_of(kind: str, n_tokens: int, k: int) -> torch.Tensor:
    """(tokens, k)"""
    ids = torch.stack([torch.randperm(N_EXPERTS)[:k] for _ in range(n_tokens)]).int()
    match kind:
        case "one expert has all":
            ids[:] = -1
            ids[:, 0] = 4
        case "nobody has any":
            ids[:] = -1
        case "some have fewer":
            ids[::3, 1:] = -1
        case "in any slot":
            ids[::2, 0] = -1
    return ids


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("form", ["Q4_0", "MXFP4", "F16"])
@pytest.mark.parametrize(
    "kind", ["all alike", "one expert has all", "nobody has any", "some have fewer", "in any slot"]
)
def test_any_distribution_of_tokens_over_experts(kind: str, form: str, instruction_set: str) -> None:
    torch.manual_seed(1)
    packing = FORMATS[form]
    sizes = ((N_EXPERTS, N_FF, N_EMBD), (N_EXPERTS, N_FF, N_EMBD), (N_EXPERTS, N_EMBD, N_FF))
    matrices = [
        PackedTensor.pack(normal(*size, seed=i) / size[2] ** 0.5, packing) for i, size in enumerate(sizes)
    ]
    exact, quantized = ExactCpuBackend(instruction_set), CpuBackend(instruction_set)
    for backend in (exact, quantized):
        backend.use_threads(3)
    for n_tokens in (1, 2, 7, 65):
        ids, weights = ids_of(kind, n_tokens, 3), normal(n_tokens, 3, seed=8).sigmoid()
        values = (normal(n_tokens, N_EMBD, seed=n_tokens), ids, weights, *matrices)
        expected = ExpertFfn().reference(values)
        scale = max(float(expected.abs().max()), 1e-6)
        assert float((run_op(exact, ExpertFfn(), values) - expected).abs().max()) <= 1e-4 * scale
        # Activations of 8 bits: a few parts in a hundred of the largest result.
        assert float((run_op(quantized, ExpertFfn(), values) - expected).abs().max()) <= 0.05 * scale


def test_a_nan_in_a_router_shows_in_its_token_only() -> None:
    logits = normal(3, 8, seed=0)
    logits[1, 5] = float("nan")
    ids = run_op(ExactCpuBackend(), Route(2), (logits, torch.full((3,), 2, dtype=torch.int32)))
    assert 5 in ids[1]
    assert torch.equal(ids[[0, 2]], Route(2).reference([logits, torch.full((3,), 2)])[[0, 2]])


@pytest.mark.parametrize("op", [Route(3), Route(3, SOFTMAX, 4, 2)])
def test_experts_are_chosen_by_softmax_scores_and_not_by_logits(op: Route) -> None:
    logits, n_used = 3 * normal(64, 8, seed=0), torch.full((64,), 3, dtype=torch.int32)
    bias = PackedTensor.pack(torch.linspace(-0.2, 0.2, 8), FORMATS["F32"])
    for values in ((logits, n_used, bias), (logits, n_used)):
        assert torch.equal(run_op(ExactCpuBackend(), op, values), op.reference(values))


def logits_of(path: Path, tokens: NDArray[np.int32], **options: Any) -> NDArray[np.float32]:
    settings = {"n_ctx": 512, "cache_type_k": "f32", "cache_type_v": "f32", "backend": "cpu-exact"}
    with LLM(path, **(settings | options)) as llm:
        return llm.logits(tokens.tolist())


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_exact_activations_give_the_logits_of_transformers(shared: Path, name: str) -> None:
    golden = np.load(shared / "golden" / name / "golden.npz")
    path = shared / "golden" / name / "model.gguf"
    assert np.abs(logits_of(path, golden["tokens"]) - golden["hf/all"]).max() <= 1e-3


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_fewer_experts_have_the_logits_of_transformers_and_of_exact_values(shared: Path, name: str) -> None:
    golden = np.load(shared / "golden" / name / "golden.npz")
    (key,) = (key for key in golden if key.startswith("hf/experts") and key.endswith("/pos"))
    options = {"n_expert_used": int(key.removeprefix("hf/experts").removesuffix("/pos"))}
    found = logits_of(shared / "golden" / name / "model.gguf", golden["tokens"], **options)
    assert np.abs(found[golden["pos"]] - golden[key]).max() <= 1e-3
    if name != "gpt-oss":  # which has no such golden
        (path,) = (shared / "golden" / name).glob("model-*.gguf")
        found = logits_of(path, golden["tokens"], **options)
        assert np.abs(found[golden["pos"]] - golden["ref/quant_deq/f32-f32/experts1/pos"]).max() <= 1e-3


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q5_1", "q4_0", "iq4_nl"])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_split_cache_of_any_type_answers_as_a_whole_one(shared: Path, name: str, kind: str) -> None:
    """Last bits of sums depend on the split and may move a value from one code of a quantizer to the next: the KL is
    then some 1e-6, where the quantizers themselves cost 3e-4 to 0.1.
    """
    path = shared / "golden" / name / "model.gguf"
    tokens = np.load(path.parent / "tokens.npy")[:96]
    types = {"cache_type_k": kind, "cache_type_v": kind}
    alone = logits_of(path, tokens, **types)
    for mode, shares in (
        ("tensor", (2, 1, 1)),
        ("tensor", (1, 0, 1)),
        ("tensor", (1,) * 5),
        ("layer", (1, 0, 1)),
    ):
        crew = {"devices": ["cpu"] * len(shares), "split_mode": mode, "tensor_split": shares}
        found = logits_of(path, tokens, **types, **crew)
        assert RowDivergence.between(alone, found).kl.max() <= 1e-5, (mode, shares)
        assert mode == "tensor" or np.array_equal(found, alone)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_packed_experts_give_the_logits_of_the_reference(shared: Path, name: str) -> None:
    (path,) = (shared / "golden" / name).glob("model-*.gguf")
    tokens = np.load(path.parent / "tokens.npy")[:100]
    expected = logits_of(path, tokens, backend="reference")
    assert np.abs(logits_of(path, tokens) - expected).max() <= 1e-3
    for way in ("ffn", "whole"):
        crew = {"devices": "cpu,cpu,cpu", "split_mode": "tensor", "tensor_split": (2, 1, 1)}
        assert np.abs(logits_of(path, tokens, split_experts=way, **crew) - expected).max() <= 1e-3


@pytest.mark.parametrize("name", ["glm4moe", "qwen3moe", "qwen3vlmoe"])
def test_quantized_activations_cost_no_more_than_in_llama_cpp(shared: Path, name: str) -> None:
    """Judged by the median and the best 90 %: one expert that is chosen otherwise dominates the mean."""
    (path,) = (shared / "golden" / name).glob("model-*.gguf")
    tokens = np.load(path.parent / "tokens.npy")
    metrics = json.loads((path.parent / "metrics.json").read_text())
    theirs = metrics["quantized_model"]["vs_dequantized_reference"]["f32/f32|fa0"]
    exact, fast = logits_of(path, tokens), logits_of(path, tokens, backend="cpu")
    kl = RowDivergence.between(exact, fast).kl
    assert float(np.median(kl)) <= 1.5 * theirs["kl_median"]
    assert float(np.sort(kl)[: int(0.9 * len(kl))].mean()) <= 1.5 * theirs["kl_mean_low90"]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_step_of_the_model_is_one_native_call(shared: Path, name: str) -> None:
    (path,) = (shared / "golden" / name).glob("model-*.gguf")
    crew = {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)}
    with LLM(path, n_ctx=64, backend="cpu", **crew) as llm:
        runner = llm._loaded.runner
        assert llm._call(lambda: runner.local.prepare(BatchShape(1, 1)).joint) is not None
