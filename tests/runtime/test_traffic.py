"""Bytes that one token reads, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley import LLM
from motley.bundled import bundled_experts_path
from motley.gguf import read_spec

Q8_0 = 34 / 32  # bytes of a value
N_EMBD, N_HEADS, N_KV_HEADS, DIM, N_EXPERTS, N_FF = 256, 4, 2, 64, 16, 96


@pytest.fixture(scope="module")
def path() -> Path:
    return bundled_experts_path()


def test_the_sizes_below_are_those_of_the_model(path: Path) -> None:
    tensors = read_spec(path).tensors
    assert tensors["blk.0.attn_q.weight"].shape == (N_HEADS * DIM, N_EMBD)
    assert tensors["blk.0.attn_k.weight"].shape == (N_KV_HEADS * DIM, N_EMBD)
    assert tensors["blk.0.ffn_down_exps.weight"].shape == (N_EXPERTS, N_EMBD, N_FF)
    assert (
        "output.weight" not in tensors
    )  # tied: the embedding is read as a whole, and one row of it once more


def test_a_token_reads_its_layers_its_experts_and_its_context(path: Path) -> None:
    spec = read_spec(path)
    n_vocab = spec.tensors["token_embd.weight"].shape[0]
    router = spec.tensors["blk.0.ffn_gate_inp.weight"]
    attention = N_EMBD * (2 * N_HEADS * DIM + 2 * N_KV_HEADS * DIM) * Q8_0
    norms = 4 * (2 * N_EMBD + 2 * DIM)
    expert = 3 * N_EMBD * N_FF * Q8_0
    outside = (n_vocab + 1) * N_EMBD * Q8_0 + 4 * N_EMBD
    cached = 2 * N_KV_HEADS * DIM * 2  # K and V of one token in one layer, f16

    def expected(n_layers: int, n_experts: int, n_context: int) -> float:
        layer = attention + norms + router.nbytes + n_experts * expert + n_context * cached
        return outside + n_layers * layer

    with LLM(path, n_ctx=64, n_parallel=1, devices="cpu,cpu", split_mode="tensor") as llm:
        assert llm.token_bytes() == expected(6, 4, 0)
        assert llm.token_bytes(50) == expected(6, 4, 50)
        assert llm.token_bytes(50, n_expert_used=7) == expected(6, 7, 50)
        assert llm.token_bytes(50, n_expert_used=1, n_layer_exit=2) == expected(2, 1, 50)
    with LLM(path, n_ctx=64, n_parallel=1, n_expert_used=2, n_layer_exit=3) as llm:
        assert llm.token_bytes(10) == expected(3, 2, 10)


def test_a_layer_with_a_window_reads_no_more_than_the_window(random_gemma3: Path) -> None:
    with LLM(random_gemma3, n_ctx=128, n_parallel=1) as llm:
        per_layer = 2 * 2 * 64 * 2  # K and V, two heads of 64 dims, f16
        assert llm.token_bytes(32) - llm.token_bytes(0) == 6 * 32 * per_layer
        assert llm.token_bytes(100) - llm.token_bytes(0) == (5 * 32 + 100) * per_layer
