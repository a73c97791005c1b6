"""No cache type is worse than llama.cpp's, rotated against rotated, as the goldens' README defines it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from motley import LLM
from motley.quality.divergence import RowDivergence

DENSE = ("gemma3", "llama", "phi3", "qwen2", "qwen3")
# One expert that is chosen otherwise costs much and dominates the mean: judged by the median and by the best 90 %.
WITH_EXPERTS = ("glm4moe", "gpt-oss", "qwen3moe", "qwen3vlmoe")
# llama.cpp rounds the range of gpt-oss's rope, so its logits differ from transformers': what a cache type costs it is
# measured against its own logits with an f32 cache. We are measured against transformers.
AGAINST_ITSELF = ("gpt-oss",)
ARCHITECTURES = (*DENSE, *WITH_EXPERTS)
TYPES = ("q8_0/q8_0", "q5_1/q5_1", "q4_0/q4_0", "iq4_nl/iq4_nl", "q8_0/q4_0")
# Equally good quantizers that make other errors differ by up to that much on one sequence, and on average.
MAX_RATIO, MAX_MEAN_RATIO = 1.5, 1.15
BACKENDS = ("reference", "cpu")
N_CTX = 1024  # the most with which phi3's short rope factors apply, as they do in its golden logits


@cache
def kl_ratio(folder: Path, types: str, backend: str) -> float:
    """Our KL against transformers' logits, over that of llama.cpp with the same cache types: the mean's ratio; with
    experts, the worse of the median's and of the mean over the best 90 %.
    """
    golden = np.load(folder / "golden.npz")
    k, v = types.split("/")
    with LLM(
        folder / "model.gguf",
        n_ctx=N_CTX,
        n_parallel=1,
        cache_type_k=k,
        cache_type_v=v,
        backend=backend,
    ) as llm:
        kl = RowDivergence.between(golden["hf/all"], llm.logits(golden["tokens"])).kl
    metrics = json.loads((folder / "metrics.json").read_text())
    truth = "vs_f32kv" if folder.name in AGAINST_ITSELF else "vs_hf"
    theirs = metrics["kv"]["f16_weights"][types]["rot"][truth]
    if folder.name in DENSE:
        return float(kl.mean()) / theirs["kl_mean"]
    low = np.sort(kl)[: int(0.9 * len(kl))]
    return max(float(np.median(kl)) / theirs["kl_median"], float(low.mean()) / theirs["kl_mean_low90"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kl_of_each_architecture_is_that_of_llama_cpp(
    shared: Path, architecture: str, types: str, backend: str
) -> None:
    assert kl_ratio(shared / "golden" / architecture, types, backend) <= MAX_RATIO


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("types", TYPES)
def test_kl_over_all_architectures_is_that_of_llama_cpp(shared: Path, types: str, backend: str) -> None:
    ratios = [kl_ratio(shared / "golden" / architecture, types, backend) for architecture in ARCHITECTURES]
    assert float(np.exp(np.log(ratios).mean())) <= MAX_MEAN_RATIO
