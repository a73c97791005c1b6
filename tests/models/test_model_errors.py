"""Files that are valid GGUF but no model that Motley can run: each gives an error that says what is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hf_to_gguf import GGUFContent, to_gguf
from model_driver import ModelDriver, logits_of
from tiny_models import GEMMA3, LLAMA, LONGROPE

from motley.errors import GGUFError, ModelError, MotleyError
from motley.models import ARCHITECTURES

N_CTX = 128


@pytest.fixture(scope="module")
def sound() -> GGUFContent:
    """A file that is fine. 4 heads of 16 dims, 2 KV heads, 2 layers."""
    return to_gguf(LLAMA.build())


@pytest.fixture
def llama(sound: GGUFContent) -> GGUFContent:
    """A copy of it, to be spoilt."""
    return GGUFContent(sound.architecture, dict(sound.metadata), dict(sound.tensors))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_file_is_fine_before_it_is_spoilt(llama: GGUFContent, path: Path) -> None:
    logits = logits_of(llama.write(path), [1, 2, 3], N_CTX)
    assert logits.isfinite().all()


def test_unknown_architecture_lists_the_supported_ones(llama: GGUFContent, path: Path) -> None:
    GGUFContent("mamba9", llama.metadata, llama.tensors).write(path)
    error = _refused(path, ModelError)
    assert "mamba9" in str(error)
    assert all(name in str(error) for name in ARCHITECTURES)


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.attn_norm.weight",
        "blk.1.attn_k.weight",
        "blk.1.attn_output.weight",
        "blk.0.ffn_norm.weight",
        "blk.1.ffn_up.weight",
        "blk.0.ffn_down.weight",
    ],
)
def test_missing_tensor_is_named(llama: GGUFContent, path: Path, name: str) -> None:
    del llama.tensors[name]
    llama.write(path)
    assert f"'{name}'" in str(_refused(path, ModelError))


@pytest.mark.parametrize("length", ["short", "long"])
def test_missing_longrope_factors_are_named(path: Path, length: str) -> None:
    content, name = to_gguf(LONGROPE.build()), f"rope_factors_{length}.weight"
    del content.tensors[name]
    content.write(path)
    original: int = LONGROPE.options["original_max_position_embeddings"]
    assert name in str(_refused(path, ModelError, n_ctx=original if length == "short" else N_CTX))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("token_embd.weight", (260, 65)),
        ("token_embd.weight", (260,)),
        ("output.weight", (259, 64)),
        ("output_norm.weight", (63,)),
        ("blk.0.attn_q.weight", (48, 64)),
        ("blk.1.attn_v.weight", (64, 32)),  # transposed
        ("blk.1.attn_output.weight", (64, 64, 1)),
        ("blk.0.ffn_up.weight", (96, 96)),
        ("blk.0.ffn_norm.weight", (64, 64)),
        ("blk.0.attn_output.bias", (1,)),
        ("rope_freqs.weight", (16,)),  # one for each pair of dims is right, so 8
    ],
)
def test_tensor_of_wrong_shape_is_named_with_its_shape(
    llama: GGUFContent, path: Path, name: str, shape: tuple[int, ...]
) -> None:
    llama.tensors[name] = torch.ones(shape)
    llama.write(path)
    message = str(_refused(path, ModelError))
    assert f"'{name}'" in message
    assert str(shape) in message


@pytest.mark.parametrize(
    "key",
    [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_missing_key_is_named(llama: GGUFContent, path: Path, key: str) -> None:
    del llama.metadata[f"llama.{key}"]
    llama.write(path)
    assert f"llama.{key} is missing" in str(_refused(path, GGUFError))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("context_length", 0),
        ("embedding_length", 0),
        ("block_count", 0),
        ("feed_forward_length", 0),
        ("attention.head_count", 0),
        ("attention.head_count_kv", 0),
        ("attention.key_length", 0),
        ("attention.head_count", "four"),
        ("attention.head_count", 4.0),
        ("attention.head_count", [4, 2]),
        ("attention.scale", math.nan),
        ("attention.scale", -0.5),
        ("feed_forward_length", [96, 64]),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 18),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", -1.0),
        ("rope.freq_base", math.inf),
        ("rope.scaling.factor", 0.0),
        ("rope.scaling.factor", math.nan),
        ("rope.scaling.attn_factor", -1.0),
        ("rope.scaling.yarn_beta_fast", 0.0),
        ("rope.scaling.yarn_beta_slow", math.nan),
    ],
)
def test_absurd_value_is_refused_with_its_key(
    llama: GGUFContent, path: Path, key: str, value: int | float | str | list[int]
) -> None:
    llama.metadata[f"llama.{key}"] = value
    llama.write(path)
    assert f"llama.{key}" in str(_refused(path, MotleyError))


@pytest.mark.parametrize(
    ("key", "value"), [("attention.sliding_window_pattern", 0), ("rope.freq_base_swa", 0.0)]
)
def test_absurd_value_of_gemma3_is_refused_with_its_key(path: Path, key: str, value: int | float) -> None:
    content = to_gguf(GEMMA3.build())
    content.metadata[f"gemma3.{key}"] = value
    content.write(path)
    assert f"gemma3.{key}" in str(_refused(path, ModelError))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count": 3}, "3 attention heads, 2 KV heads"),
        ({"attention.head_count_kv": 3}, "4 attention heads, 3 KV heads"),
        ({"attention.head_count_kv": 8}, "4 attention heads, 8 KV heads"),
        ({"attention.head_count": 2**31 - 2}, "2147483646 attention heads"),
        ({"attention.head_count": 2**32 - 2}, "is 4294967294, but must be at most 2147483647"),
        ({"embedding_length": 3}, "4 attention heads, 2 KV heads, embedding of 3"),
        ({"embedding_length": 2**31 - 4 * 16}, "'token_embd.weight' has shape (260, 64)"),
        ({"block_count": 2**31 - 1}, "is 2147483647, but the file has tensors of 2 layers"),
        ({"attention.key_length": 16, "attention.value_length": 32}, "keys and values of different length"),
        (
            {"rope.scaling.type": "spiral"},
            "'spiral' is not supported; there are none, linear, yarn",
        ),
        ({"rope.scaling.type": "yarn"}, "original context of 0 tokens"),
        ({"rope.scaling.type": "longrope"}, "'rope_factors_short.weight'"),
        ({"expert_count": 8, "expert_used_count": 2}, "'llama' with experts is not supported"),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    llama: GGUFContent, path: Path, changes: dict[str, int | str], message: str
) -> None:
    for key, value in changes.items():
        llama.metadata[f"llama.{key}"] = value
    llama.write(path)
    assert message in str(_refused(path, ModelError))


def _refused(path: Path, kind: type[MotleyError], n_ctx: int = N_CTX) -> MotleyError:
    """The error that opening the model ends in; it names the file."""
    with pytest.raises(kind) as caught:
        ModelDriver(path, n_ctx)
    assert str(path) in str(caught.value)
    return caught.value
