"""Stored logits and texts of other engines, for files that other tools have written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from motley import LLM

TOLERANCE = 1e-3
TABULATED_GELU_TOLERANCE = 1e-2  # that reference is llama.cpp, whose GELU is a table of float16 values
N_CTX = 1024  # the most with which phi3's short rope factors apply, as they do in its golden logits


@pytest.fixture(scope="module", params=["gemma3", "llama", "phi3", "qwen2", "qwen3"])
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


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Iterator[LLM]:
    (path,) = folder.glob("model-*.gguf")
    with _open(path) as llm:
        yield llm


def test_long_text_has_the_logits_of_transformers(plain: LLM, golden: Any) -> None:
    assert _difference(plain.logits(golden["tokens"]), golden["hf/all"]) <= TOLERANCE


def test_short_text_has_the_logits_of_transformers(plain: LLM, golden: Any) -> None:
    assert _difference(plain.logits(golden["tokens_short"]), golden["hf/short"]) <= TOLERANCE


def test_quantized_weights_have_the_logits_of_their_exact_values(
    quantized: LLM, golden: Any, folder: Path
) -> None:
    tolerance = TABULATED_GELU_TOLERANCE if folder.name == "gemma3" else TOLERANCE
    long = quantized.logits(golden["tokens"])[golden["pos"]]
    assert _difference(long, golden["ref/quant_deq/f32-f32/pos"]) <= tolerance
    short = quantized.logits(golden["tokens_short"])
    assert _difference(short, golden["ref/quant_deq/f32-f32/short"]) <= tolerance


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
