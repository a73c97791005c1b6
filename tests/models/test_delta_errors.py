"""Files of models with gated delta nets whose numbers or tensors do not fit: refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_to_gguf import GGUFContent, to_gguf
from tiny_models import QWEN3NEXT

from motley import LLM
from motley.errors import ConfigError, ModelError


@pytest.fixture
def content() -> GGUFContent:
    return to_gguf(QWEN3NEXT.build())


def refuse(content: GGUFContent, folder: Path, match: str) -> None:
    path = content.write(folder / "model.gguf")

    def loading(done: int, total: int) -> None:
        raise AssertionError("weights were loaded")

    with pytest.raises(ModelError, match=match):
        LLM(path, n_ctx=64, backend="reference", progress=loading)


@pytest.mark.parametrize(
    "name",
    ["attn_qkv.weight", "ssm_conv1d.weight", "ssm_a", "ssm_dt.bias", "ssm_norm.weight", "ssm_out.weight"],
)
def test_a_missing_tensor_of_the_state_is_named(content: GGUFContent, tmp_path: Path, name: str) -> None:
    del content.tensors[f"blk.1.{name}"]
    refuse(content, tmp_path, rf"'blk.1.{name}'.*missing")


@pytest.mark.parametrize(
    ("key", "value"),
    [("time_step_rank", 3), ("group_count", 3), ("inner_size", 65), ("state_size", 17), ("group_count", 0)],
)
def test_head_counts_that_do_not_fit_are_refused(
    content: GGUFContent, tmp_path: Path, key: str, value: int
) -> None:
    content.metadata[f"qwen3next.ssm.{key}"] = value
    refuse(content, tmp_path, "ssm")


def test_heads_that_differ_from_the_tensors_are_refused(content: GGUFContent, tmp_path: Path) -> None:
    content.metadata["qwen3next.ssm.group_count"] = 4
    refuse(content, tmp_path, "has shape .* asks for")


@pytest.mark.parametrize("n_layers", [5, 2**31 - 1])
def test_more_layers_than_the_file_has_are_refused(
    content: GGUFContent, tmp_path: Path, n_layers: int
) -> None:
    """At once: a list of all layers would not fit into memory."""
    content.metadata["qwen3next.block_count"] = n_layers
    refuse(content, tmp_path, f"is {n_layers}, but the file has tensors of 4 layers")


@pytest.mark.parametrize("n_taps", [1, 65])
def test_impossible_convolutions_are_refused(content: GGUFContent, tmp_path: Path, n_taps: int) -> None:
    content.metadata["qwen3next.ssm.conv_kernel"] = n_taps
    refuse(content, tmp_path, "conv_kernel")


def test_a_model_without_attention_is_refused(content: GGUFContent, tmp_path: Path) -> None:
    content.metadata["qwen3next.full_attention_interval"] = 5
    refuse(content, tmp_path, "no layer has attention")


def test_a_state_of_another_shape_is_refused(content: GGUFContent, tmp_path: Path) -> None:
    content.tensors["blk.0.ssm_a"] = torch.ones(5)
    refuse(content, tmp_path, "'blk.0.ssm_a' has shape")


def test_an_unknown_type_of_states_is_refused(content: GGUFContent, tmp_path: Path) -> None:
    path = content.write(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="unknown type of recurrent states 'q8_0'"):
        LLM(path, state_type="q8_0")


@pytest.mark.parametrize("backend", ["reference", "cpu-exact"])
def test_bf16_states_are_close_to_f32_ones_and_half_as_large(
    content: GGUFContent, tmp_path: Path, backend: str
) -> None:
    path, tokens = content.write(tmp_path / "model.gguf"), list(range(60))
    logits, sizes = [], []
    for kind in ("f32", "bf16"):
        with LLM(path, n_ctx=64, n_batch=7, backend=backend, state_type=kind, cache_type_k="f32") as llm:
            logits.append(torch.from_numpy(llm.logits(tokens)))
            state = llm.kv_stats().layout.state
            assert state is not None
            sizes.append(state.slot_bytes)
    assert sizes[0] == 2 * sizes[1]
    difference = (logits[0] - logits[1]).abs().max().item()
    assert 0 < difference < 0.5
