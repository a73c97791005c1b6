"""The rotation of K and V: it changes nothing but what quantization loses, and costs no communication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from motley import LLM
from motley.gguf import ModelSpec, read_spec
from motley.models import DecoderParams, GraphOptions, read_params, rotation_size
from motley.quality import compare
from motley.runtime import Crew, ModelSplit, make_crew
from motley.runtime.explain import explain

GOLDEN = ("gemma3", "llama", "phi3", "qwen2", "qwen3")  # of the reference data; others are made on the spot
N_CTX = 64
CREW: dict[str, Any] = {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)}


def logits(path: Path, tokens: list[int], cache_type: str, **options: Any) -> NDArray[np.float32]:
    with LLM(
        path,
        n_ctx=len(tokens),
        n_parallel=1,
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        backend="reference",
        **options,
    ) as llm:
        return llm.logits(tokens)


@pytest.fixture(params=["random_llama", "random_gemma3", *GOLDEN])
def model(request: pytest.FixtureRequest) -> Path:
    name: str = request.param
    path: Path = request.getfixturevalue(name if name.startswith("random") else "shared")
    return path if name.startswith("random") else path / "golden" / name / "model.gguf"


@given(st.integers(1, 1024))
def test_the_size_is_the_largest_power_of_two_that_divides_a_head_and_holds_a_block(head_dim: int) -> None:
    fitting = [size for size in (32, 64, 128, 256, 512, 1024) if head_dim % size == 0]
    assert rotation_size(head_dim) == max(fitting, default=0)


@pytest.mark.parametrize("crew", [{}, CREW], ids=["alone", "3,1"])
def test_a_cache_that_loses_nothing_has_the_same_logits_rotated(
    model: Path, crew: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = np.random.default_rng(1).integers(1, 250, N_CTX).tolist()
    plain = logits(model, tokens, "f32", **crew)

    def split_rotated(spec: ModelSpec, params: DecoderParams, crew: Crew, *_: Any, **__: Any) -> ModelSplit:
        size = rotation_size(params.head_dim)
        assert size >= 32
        return ModelSplit(spec, params, crew, GraphOptions(N_CTX, k_rotation=size, v_rotation=size))

    monkeypatch.setattr("motley.assembly.split_model", split_rotated)  # which only rotates quantized types
    rotated = logits(model, tokens, "f32", **crew)
    assert not np.array_equal(rotated, plain)  # it did something
    np.testing.assert_allclose(rotated, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cache_type", ["q8_0", "q5_1", "q4_0", "iq4_nl"])
def test_a_rotated_cache_loses_less_where_keys_have_outliers(shared: Path, cache_type: str) -> None:
    folder = shared / "golden" / "llama"
    golden = np.load(folder / "golden.npz")
    tokens = golden["tokens"].tolist()
    rotated, plain = (
        compare(
            golden["hf/all"], logits(folder / "model.gguf", tokens, cache_type, kv_rotation=is_rotated)
        ).kl_mean
        for is_rotated in (True, False)
    )
    assert rotated < 0.8 * plain


def test_the_split_follows_the_heads_through_the_rotation(model: Path) -> None:
    spec = read_spec(model)
    params = read_params(spec)
    size = rotation_size(params.head_dim)

    def collectives(k_rotation: int, v_rotation: int) -> tuple[dict[str, int], int]:
        crew = make_crew("cpu,cpu,cpu", "tensor", (2, 1, 1))
        found = explain(ModelSplit(spec, params, crew, GraphOptions(N_CTX, 1, k_rotation, v_rotation)))
        return found["collectives"], found["bytes_per_token"]

    assert collectives(size, size) == collectives(size, 0) == collectives(0, size) == collectives(0, 0)


def test_heads_that_no_rotation_fits_run_without_and_the_model_says_so(random_narrow: Path) -> None:
    path = random_narrow
    tokens = list(range(3, 30))
    np.testing.assert_array_equal(
        logits(path, tokens, "q8_0", kv_rotation=True), logits(path, tokens, "q8_0", kv_rotation=False)
    )
    with LLM(path, n_ctx=N_CTX, cache_type_v="q8_0") as llm:
        assert llm.notices == ("the q8_0 KV cache is not rotated: a head's 24 dims are not a multiple of 32",)


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("random_llama", {"cache_type_k": "q8_0"}),  # is rotated
        ("random_narrow", {"cache_type_k": "bf16"}),  # needs none
        ("random_narrow", {"cache_type_k": "q8_0", "kv_rotation": False}),  # wants none
    ],
)
def test_nothing_is_said_where_everything_is_as_asked(
    request: pytest.FixtureRequest, path: str, options: dict[str, Any]
) -> None:
    with LLM(request.getfixturevalue(path), n_ctx=N_CTX, **options) as llm:
        assert llm.notices == ()
