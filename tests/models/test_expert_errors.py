"""Files whose experts disagree with their metadata are refused before anything is loaded, and say what is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hf_to_gguf import GGUFContent, to_gguf
from tiny_models import GLM4MOE, GLM_GROUPED, GPT_OSS, QWEN3MOE

from motley import LLM
from motley.errors import ConfigError, ModelError, RequestError
from motley.gguf import read_spec
from motley.models import BatchShape, GraphOptions, build_graph, read_params
from motley.quality import choose_efforts

N_EXPERTS, N_FF, N_EMBD = 8, 32, 64


@pytest.fixture(scope="module")
def sound() -> GGUFContent:
    return to_gguf(QWEN3MOE.build())


@pytest.fixture
def content(sound: GGUFContent) -> GGUFContent:
    """A copy, to be spoilt."""
    return GGUFContent(sound.architecture, dict(sound.metadata), dict(sound.tensors))


def refused(content: GGUFContent, tmp_path: Path) -> str:
    """What the graph's builder says: nothing has been loaded then."""
    spec = read_spec(content.write(tmp_path / "model.gguf"))
    with pytest.raises(ModelError) as caught:
        build_graph(spec, read_params(spec), BatchShape(1, 1), GraphOptions(64))
    assert str(spec.path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("part", ["gate_inp", "gate_exps", "up_exps", "down_exps"])
def test_a_missing_tensor_is_named(content: GGUFContent, tmp_path: Path, part: str) -> None:
    name = f"blk.1.ffn_{part}.weight"
    del content.tensors[name]
    assert f"'{name}'" in refused(content, tmp_path)


@pytest.mark.parametrize(
    ("part", "shape"),
    [
        ("gate_inp", (N_EXPERTS - 1, N_EMBD)),
        ("gate_exps", (N_EXPERTS + 1, N_FF, N_EMBD)),
        ("up_exps", (N_EXPERTS, N_EMBD, N_FF)),  # transposed
        ("up_exps", (N_EXPERTS * N_FF, N_EMBD)),
        ("down_exps", (N_EXPERTS, N_EMBD, N_FF - 1)),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both(
    content: GGUFContent, tmp_path: Path, part: str, shape: tuple[int, ...]
) -> None:
    name = f"blk.0.ffn_{part}.weight"
    content.tensors[name] = torch.ones(shape)
    message = refused(content, tmp_path)
    assert f"'{name}'" in message
    assert str(shape) in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_used_count": 9}, "expert_used_count is 9, but qwen3moe.expert_count is 8"),
        ({"expert_used_count": 0}, "qwen3moe.expert_used_count is 0"),
        ({"expert_count": 0}, "qwen3moe.expert_count is 0"),
        ({"expert_count": 2**31 - 1}, "'blk.0.ffn_gate_inp.weight' has shape (8, 64)"),
        ({"expert_feed_forward_length": 48}, "'blk.0.ffn_gate_exps.weight' has shape (8, 32, 64)"),
        ({"expert_group_count": 3}, "1 of 3 groups of 8 experts"),
        ({"expert_group_count": 2, "expert_group_used_count": 3}, "3 of 2 groups"),
        ({"expert_group_count": 8}, "is 2, but a token can use 1 at most: the experts of 1 of 8 groups"),
        ({"expert_gating_func": 7}, "expert_gating_func 7 is not supported"),
        ({"expert_weights_scale": math.nan}, "qwen3moe.expert_weights_scale is nan"),
        ({"expert_weights_scale": math.inf}, "qwen3moe.expert_weights_scale is inf"),
        ({"expert_weights_scale": -2.5}, "qwen3moe.expert_weights_scale is -2.5"),
        ({"expert_shared_count": 1}, "'blk.0.ffn_gate_shexp.weight'"),
        ({"nextn_predict_layers": 2}, "nextn_predict_layers is 2, but qwen3moe.block_count is 2"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    content: GGUFContent, tmp_path: Path, changes: dict[str, float], message: str
) -> None:
    if "expert_group_count" in changes:
        content.metadata["qwen3moe.expert_group_used_count"] = 1
    content.metadata.update({f"qwen3moe.{key}": value for key, value in changes.items()})
    assert message in refused(content, tmp_path)


def test_no_more_experts_can_be_asked_for_than_the_groups_of_a_token_have(tmp_path: Path) -> None:
    path = to_gguf(GLM_GROUPED.build()).write(tmp_path / "model.gguf")  # two of four groups of three experts
    params = read_params(read_spec(path))
    assert [choice.n_experts for choice in choose_efforts(params, [1, 6])] == [1, 6]
    with pytest.raises(ConfigError, match="--experts 7 is not possible"):
        choose_efforts(params, [7])
    with LLM(path, n_ctx=32) as llm:
        assert llm.logits([1, 2], n_expert_used=6).shape[0] == 2
        with pytest.raises(RequestError, match="has 12 experts, of which a token can use 6") as caught:
            llm.logits([1, 2], n_expert_used=7)
    assert caught.value.hint == "n_expert_used must be an integer from 1 to 6"


def test_a_model_that_has_one_bias_of_its_experts_needs_all(tmp_path: Path) -> None:
    content = to_gguf(GPT_OSS.build())
    del content.tensors["blk.0.ffn_down_exps.bias"]
    assert "'blk.0.ffn_down_exps.bias'" in refused(content, tmp_path)


def test_sinks_of_other_heads_are_refused(tmp_path: Path) -> None:
    content = to_gguf(GPT_OSS.build())
    content.tensors["blk.0.attn_sinks.weight"] = torch.ones(5)
    assert "'blk.0.attn_sinks.weight'" in refused(content, tmp_path)


@pytest.mark.parametrize("window", [None, 0])
def test_gpt_oss_needs_its_window(tmp_path: Path, window: int | None) -> None:
    """Without it, even layers would attend to all tokens."""
    content = to_gguf(GPT_OSS.build())
    content.metadata.pop("gpt-oss.attention.sliding_window")
    if window is not None:
        content.metadata["gpt-oss.attention.sliding_window"] = window
    assert "gpt-oss.attention.sliding_window" in refused(content, tmp_path)


def test_a_shared_expert_of_another_width_is_refused(tmp_path: Path) -> None:
    content = to_gguf(GLM4MOE.build())
    content.metadata["glm4moe.expert_shared_feed_forward_length"] = 48
    assert "'blk.1.ffn_gate_shexp.weight'" in refused(content, tmp_path)
