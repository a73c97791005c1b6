"""Stored logits and texts of other engines, for files that other tools have written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from motley import LLM

TOLERANCE = 1e-3
TABULATED_GELU_TOLERANCE = 1e-2  # that reference is llama.cpp, whose GELU is a table of float16 values
N_CTX = 1024  # the most with which phi3's short rope factors apply, as they do in its golden logits


DENSE = ("gemma3", "llama", "phi3", "qwen2", "qwen3")
WITH_EXPERTS = ("glm4moe", "gpt-oss", "qwen3moe", "qwen3next", "qwen3vlmoe")


ARCHITECTURES = (*DENSE, *WITH_EXPERTS)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, shared: Path) -> Path:
    """An architecture's files."""
    path: Path = shared / "golden" / request.param
    return path


@pytest.fixture(scope="module")
def golden(folder: Path) -> Any:
    """Arrays by the names that the folder's README explains."""
    return np.load(folder / "golden.npz")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    """Weights as F16."""
    with _open(folder / "model.gguf") as llm:
        yield llm


def test_long_text_has_the_logits_of_transformers(plain: LLM, golden: Any) -> None:
    assert _difference(plain.logits(golden["tokens"]), golden["hf/all"]) <= TOLERANCE


def test_short_text_has_the_logits_of_transformers(plain: LLM, golden: Any) -> None:
    assert _difference(plain.logits(golden["tokens_short"]), golden["hf/short"]) <= TOLERANCE


@pytest.mark.parametrize("folder", WITH_EXPERTS, indirect=True)
def test_fewer_experts_have_the_logits_of_transformers(plain: LLM, golden: Any) -> None:
    (key,) = (name for name in golden if name.startswith("hf/experts") and name.endswith("/pos"))
    n_used = int(key.removeprefix("hf/experts").removesuffix("/pos"))
    long = plain.logits(golden["tokens"], n_expert_used=n_used)[golden["pos"]]
    assert _difference(long, golden[key]) <= TOLERANCE
    short = plain.logits(golden["tokens_short"], n_expert_used=n_used)
    assert _difference(short, golden[f"hf/experts{n_used}/short"]) <= TOLERANCE


def test_an_early_exit_has_the_logits_of_transformers(shared: Path) -> None:
    folder = shared / "golden" / "llama"
    golden = np.load(folder / "golden.npz")
    with _open(folder / "model.gguf") as llm:
        logits = llm.logits(golden["tokens"], n_layer_exit=2)
    assert _difference(logits, golden["hf/exit2/all"]) <= TOLERANCE


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "gpt-oss"])
def test_quantized_weights_have_the_logits_of_their_exact_values(shared: Path, architecture: str) -> None:
    folder = shared / "golden" / architecture
    golden = np.load(folder / "golden.npz")
    tolerance = TABULATED_GELU_TOLERANCE if architecture == "gemma3" else TOLERANCE
    (path,) = folder.glob("model-*.gguf")
    with _open(path) as quantized:
        long = quantized.logits(golden["tokens"])[golden["pos"]]
        assert _difference(long, golden["ref/quant_deq/f32-f32/pos"]) <= tolerance
        short = quantized.logits(golden["tokens_short"])
        assert _difference(short, golden["ref/quant_deq/f32-f32/short"]) <= tolerance
        if architecture in WITH_EXPERTS:  # that golden's number of experts is 1
            fewer = quantized.logits(golden["tokens"], n_expert_used=1)[golden["pos"]]
            assert _difference(fewer, golden["ref/quant_deq/f32-f32/experts1/pos"]) <= tolerance


def test_mxfp4_experts_have_the_logits_of_their_exact_values(shared: Path, tmp_path: Path) -> None:
    """gpt-oss has no golden for it: the same file with all weights unpacked by the `gguf` package takes its place."""
    path = shared / "golden" / "gpt-oss" / "model-MXFP4_MOE.gguf"
    tokens = np.load(path.parent / "tokens.npy")
    reader = GGUFReader(path)
    assert any(t.tensor_type == GGMLQuantizationType.MXFP4 for t in reader.tensors)
    writer = GGUFWriter(tmp_path / "exact.gguf", "gpt-oss")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(
                key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with _open(path) as packed, _open(tmp_path / "exact.gguf") as exact:
        assert _difference(packed.logits(tokens), exact.logits(tokens)) <= TOLERANCE


def test_stories260k_writes_the_stored_text(shared: Path) -> None:
    folder = shared / "data" / "models" / "stories260K"
    stored = json.loads((folder / "golden_greedy.json").read_text())
    prompt, tokens = stored["prompt"], stored["greedy"]
    with _open(folder / "stories260K.gguf") as llm:  # the text goes on beyond the trained context
        n_new = len(tokens) - len(prompt)
        completion = llm.generate(prompt, max_tokens=n_new, temperature=0, ignore_eos=True)
        assert [*prompt, *completion.tokens] == tokens
        last = llm.logits(tokens[:-1])[-1]
    best, logits = zip(*stored["logits_last_top5"], strict=True)
    assert np.argsort(-last)[: len(best)].tolist() == list(best)
    np.testing.assert_allclose(last[list(best)], logits, atol=TOLERANCE)


def _open(path: Path) -> LLM:
    return LLM(path, n_ctx=N_CTX, cache_type_k="f32", cache_type_v="f32", backend="reference")


def _difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())
