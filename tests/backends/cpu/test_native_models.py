"""Whole models: the goldens, all cache types, and crews of virtual devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from motley import LLM
from motley.backends.cpu import CpuBackend, backend, is_available
from motley.backends.cpu.weights import MappedTensor
from motley.kvcache.types import CACHE_TYPES

if not is_available():
    pytest.skip("the native module is not built", allow_module_level=True)

N_CTX = 1024  # the most with which phi3's short rope factors apply
ARCHITECTURES = ["llama", "qwen2", "qwen3", "phi3", "gemma3"]


def logits(path: Path, tokens: NDArray[np.int32], **options: Any) -> NDArray[np.float64]:
    plain = {"n_ctx": N_CTX, "cache_type_k": "f32", "cache_type_v": "f32", "backend": "cpu"}
    with LLM(path, **(plain | options)) as llm:  # type: ignore[arg-type]
        return llm.logits(tokens.tolist()).astype(np.float64)


def log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = x - x.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def divergence(reference: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Mean KL(reference ‖ other) in nats."""
    a, b = log_softmax(reference), log_softmax(other)
    return float((np.exp(a) * (a - b)).sum(-1).mean())


def quantized_file(folder: Path) -> Path:
    (path,) = folder.glob("model-*.gguf")
    return path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_exact_activations_give_the_logits_of_transformers(shared: Path, name: str) -> None:
    folder = shared / "golden" / name
    golden = np.load(folder / "golden.npz")
    assert np.abs(logits(folder / "model.gguf", golden["tokens"]) - golden["hf/all"]).max() <= 1e-3


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_quantized_activations_cost_no_more_than_in_llama_cpp(shared: Path, name: str) -> None:
    folder = shared / "golden" / name
    golden, path = np.load(folder / "golden.npz"), quantized_file(folder)
    figures = json.loads((folder / "metrics.json").read_text())["quantized_model"]["vs_dequantized_reference"]
    exact = logits(path, golden["tokens"], backend="cpu-exact")
    tolerance = 1e-2 if name == "gemma3" else 1e-3  # that golden's GELU is a table of float16 values
    assert np.abs(exact[golden["pos"]] - golden["ref/quant_deq/f32-f32/pos"]).max() <= tolerance
    # 8 bits in blocks of 32 on both sides: equal up to how roundings fall
    assert divergence(exact, logits(path, golden["tokens"])) <= 1.1 * figures["f32/f32|fa0"]["kl_mean"]


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_every_cache_type_is_as_close_as_the_references(shared: Path, kind: str) -> None:
    folder = shared / "golden" / "llama"
    tokens = np.load(folder / "tokens.npy")[:96]
    options = {"cache_type_k": kind, "cache_type_v": kind}
    truth = logits(folder / "model.gguf", tokens, backend="reference")
    cost = divergence(truth, logits(folder / "model.gguf", tokens, backend="reference", **options))
    assert divergence(truth, logits(folder / "model.gguf", tokens, **options)) <= 1.3 * cost + 1e-5


@pytest.mark.parametrize(
    "crew",
    [{}, {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)}, {"devices": "cpu,cpu"}],
    ids=["one device", "tensor", "layer"],
)
def test_a_model_that_stays_in_its_file_gives_the_logits_of_a_loaded_one(
    bundled: Path, crew: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.arange(1, 40, dtype=np.int32)
    repacked = logits(bundled, tokens, **crew)
    monkeypatch.setattr(backend, "_WORTH_MAPPING", 0)
    loaded: list[object] = []
    load = CpuBackend.load
    monkeypatch.setattr(CpuBackend, "load", lambda *args: loaded.append(load(*args)) or loaded[-1])
    mapped = logits(bundled, tokens, **crew)
    assert any(isinstance(weight, MappedTensor) for weight in loaded)
    assert np.abs(mapped - repacked).max() <= 1e-4 * np.abs(repacked).max()


@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1, 0, 2)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_virtual_devices_give_one_devices_result(shared: Path, name: str, shares: tuple[int, ...]) -> None:
    path = quantized_file(shared / "golden" / name)
    tokens = np.load(shared / "golden" / name / "tokens.npy")[:64]
    crew = {"devices": ",".join(["cpu"] * len(shares)), "split_mode": "tensor", "tensor_split": shares}
    alone = logits(path, tokens, backend="cpu-exact")
    assert np.abs(logits(path, tokens, backend="cpu-exact", **crew) - alone).max() <= 1e-3


def test_layers_over_devices_give_the_same_bits(shared: Path) -> None:
    path = quantized_file(shared / "golden" / "llama")
    tokens = np.load(shared / "golden" / "llama" / "tokens.npy")[:64]
    crew = {"devices": "cpu,cpu,cpu", "split_mode": "layer"}
    assert np.array_equal(logits(path, tokens, **crew), logits(path, tokens))


@pytest.mark.parametrize("n_threads", [1, 3])
def test_the_number_of_threads_changes_nothing(shared: Path, n_threads: int) -> None:
    path = quantized_file(shared / "golden" / "llama")
    tokens = np.load(shared / "golden" / "llama" / "tokens.npy")[:64]
    assert np.array_equal(logits(path, tokens, n_threads=n_threads), logits(path, tokens, n_threads=2))
