"""No cache type is worse than llama.cpp's, rotated against rotated, as the goldens' README defines it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from motley import LLM
from motley.quality import compare

ARCHITECTURES = ("gemma3", "llama", "phi3", "qwen2", "qwen3")
TYPES = ("q8_0/q8_0", "q5_1/q5_1", "q4_0/q4_0", "iq4_nl/iq4_nl", "q8_0/q4_0")
# Equally good quantizers that make other errors differ by up to that much on one sequence, and on average.
MOST_FOR_ONE, MOST_ON_AVERAGE = 1.5, 1.15
N_CTX = 1024  # the most with which phi3's short rope factors apply, as they do in its golden logits


@cache
def kl_ratio(folder: Path, types: str) -> float:
    """Our mean KL against transformers' logits, over that of llama.cpp with the same cache types."""
    golden = np.load(folder / "golden.npz")
    k, v = types.split("/")
    with LLM(
        folder / "model.gguf",
        n_ctx=N_CTX,
        n_parallel=1,
        cache_type_k=k,
        cache_type_v=v,
        backend="reference",
    ) as llm:
        ours = compare(golden["hf/all"], llm.logits(golden["tokens"])).kl_mean
    metrics = json.loads((folder / "metrics.json").read_text())
    theirs: float = metrics["kv"]["f16_weights"][types]["rot"]["vs_hf"]["kl_mean"]
    return ours / theirs


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mean_kl_of_each_architecture_is_that_of_llama_cpp(
    shared: Path, architecture: str, types: str
) -> None:
    assert kl_ratio(shared / "golden" / architecture, types) <= MOST_FOR_ONE


@pytest.mark.parametrize("types", TYPES)
def test_mean_kl_over_all_architectures_is_that_of_llama_cpp(shared: Path, types: str) -> None:
    ratios = [kl_ratio(shared / "golden" / architecture, types) for architecture in ARCHITECTURES]
    assert float(np.exp(np.log(ratios).mean())) <= MOST_ON_AVERAGE
