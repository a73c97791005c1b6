"""Every tensor of every architecture with experts: without it, in another shape or of another type the file is refused.

The messages name the tensor. Metadata is that of the sound file, and nothing has been loaded when they come.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_to_gguf import GGUFContent, to_gguf
from test_fused_experts import fused
from tiny_models import GLM4MOE, GLM_GROUPED, GPT_OSS, QWEN3MOE, QWEN3NEXT, QWEN3VLMOE, QWEN35MOE, TinyModel

from motley import LLM
from motley.errors import ModelError, RequestError
from motley.gguf import ModelSpec, TensorInfo, read_spec
from motley.models import check_tensors, read_params

# Tensors that files of these architectures may leave out: the output matrix is the embedding's then (not in gpt-oss).
OPTIONAL = ("output.weight",)
# Of a multi-token prediction layer: the model's own are used then.
OPTIONAL_OF_NEXTN = (
    "nextn.embed_tokens.weight",
    "nextn.shared_head_head.weight",
    "nextn.shared_head_norm.weight",
)


def with_nextn(model: TinyModel, **overrides: Any) -> GGUFContent:
    """The model with its last layer, an attention layer, as a multi-token prediction layer."""
    content = to_gguf(model.build(**overrides))
    arch, n_embd = content.architecture, int(content.metadata[f"{content.architecture}.embedding_length"])
    content.metadata[f"{arch}.nextn_predict_layers"] = 1
    label = f"blk.{content.metadata[f'{arch}.block_count'] - 1}.nextn."
    content.tensors.update(
        {f"{label}{name}.weight": torch.ones(n_embd) for name in ("enorm", "hnorm", "shared_head_norm")}
    )
    content.tensors[f"{label}eh_proj.weight"] = torch.ones(n_embd, 2 * n_embd)
    for name in ("embed_tokens", "shared_head_head"):
        content.tensors[f"{label}{name}.weight"] = torch.ones(content.tensors["token_embd.weight"].shape)
    return content


FILES: dict[str, Callable[[], GGUFContent]] = {
    **{
        model.name: lambda model=model: to_gguf(model.build())  # type: ignore[misc]
        for model in (QWEN3MOE, QWEN3VLMOE, QWEN3NEXT, QWEN35MOE, GLM4MOE, GLM_GROUPED, GPT_OSS)
    },
    "glm4moe, nextn": lambda: with_nextn(GLM4MOE),
    "qwen3next, nextn": lambda: with_nextn(QWEN3NEXT, layer_types=["linear_attention", "full_attention"] * 2),
    "qwen3moe, fused": lambda: fused(to_gguf(QWEN3MOE.build())),
    "gpt-oss, fused": lambda: fused(to_gguf(GPT_OSS.build())),
}


@pytest.fixture(scope="module", params=FILES)
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(FILES[request.param]().write(tmp_path_factory.mktemp("sound") / "model.gguf"))


def refusal(spec: ModelSpec) -> str:
    """The message of the error; "" if the file is accepted."""
    try:
        check_tensors(spec, read_params(spec))
    except ModelError as error:
        return str(error)
    return ""


def without(spec: ModelSpec, *names: str) -> ModelSpec:
    return replace(spec, tensors={name: info for name, info in spec.tensors.items() if name not in names})


def changed(spec: ModelSpec, info: TensorInfo) -> ModelSpec:
    return replace(spec, tensors={**spec.tensors, info.name: info})


def is_optional(spec: ModelSpec, name: str) -> bool:
    is_known = name in OPTIONAL or name.endswith(OPTIONAL_OF_NEXTN)
    return is_known and not (name == "output.weight" and spec.architecture == "gpt-oss")


def test_a_sound_file_is_accepted(spec: ModelSpec) -> None:
    assert refusal(spec) == ""


def test_a_file_without_one_of_its_tensors_is_refused(spec: ModelSpec) -> None:
    for name in spec.tensors:
        message = refusal(without(spec, name))
        assert is_optional(spec, name) if message == "" else f"{name!r}" in message, (name, message)


def test_a_file_without_a_tensor_of_all_layers_is_refused(spec: ModelSpec) -> None:
    for part in {re.sub(r"^blk\.\d+\.", "", name) for name in spec.tensors}:
        names = [name for name in spec.tensors if name == part or re.fullmatch(rf"blk\.\d+\.{part}", name)]
        if not all(is_optional(spec, name) for name in names):
            message = refusal(without(spec, *names))
            assert any(f"{name!r}" in message for name in names), (part, message)


def wrong_shapes(info: TensorInfo) -> Iterator[tuple[int, ...]]:
    if info.name != "token_embd.weight":  # its rows are the vocabulary's size
        yield (info.shape[0] - 1, *info.shape[1:])
    yield (*info.shape[:-1], info.shape[-1] + 1)
    yield (*info.shape, 2)
    yield info.shape[::-1]


def test_a_tensor_of_another_shape_is_refused(spec: ModelSpec) -> None:
    for name, info in spec.tensors.items():
        for shape in wrong_shapes(info):
            if shape != info.shape:
                message = refusal(changed(spec, replace(info, shape=shape)))
                assert f"{name!r}" in message, (name, shape, message)
                assert str(shape) in message


@pytest.mark.parametrize("type_name", ["I32", "F64", "TQ1_0"])
def test_a_tensor_of_a_type_that_is_no_weight_is_refused(spec: ModelSpec, type_name: str) -> None:
    for name, info in spec.tensors.items():
        message = refusal(changed(spec, replace(info, type_name=type_name)))
        assert f"{name!r}" in message, (name, message)
        assert type_name in message


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (GLM4MOE, "blk.1.exp_probs_b.bias"),  # a NaN would only change the choice of experts
        (GPT_OSS, "blk.0.ffn_gate_inp.bias"),
        (GPT_OSS, "blk.2.ffn_down_exps.bias"),
        (GPT_OSS, "blk.1.attn_sinks.weight"),
        (QWEN3MOE, "blk.1.ffn_gate_inp.weight"),
        (QWEN3NEXT, "blk.0.ssm_dt.bias"),
        (QWEN3MOE, "output_norm.weight"),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_small_tensors_with_values_that_are_no_numbers_are_refused(
    tmp_path: Path, model: TinyModel, name: str, value: float
) -> None:
    content = to_gguf(model.build())
    n_values = spoil(content, name, value)
    message = refusal(read_spec(content.write(tmp_path / "model.gguf")))
    assert f"1 of {n_values} values of the tensor {name!r} are NaN or infinite" in message


def test_a_prediction_layer_with_a_nan_is_refused(tmp_path: Path) -> None:
    content = with_nextn(GLM4MOE)
    spoil(content, "blk.2.nextn.hnorm.weight", math.nan)
    assert "'blk.2.nextn.hnorm.weight'" in refusal(read_spec(content.write(tmp_path / "model.gguf")))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("model", "name"),
    [(GLM4MOE, "exp_probs_b.bias"), (GPT_OSS, "ffn_gate_inp.bias"), (GPT_OSS, "attn_sinks.weight")],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_bias_of_minus_infinity_excludes_an_expert_or_a_sink(
    tmp_path: Path, model: TinyModel, name: str, backend: str
) -> None:
    logits = []
    for value in (-math.inf, -1e30):
        content = to_gguf(model.build())
        for full in [full for full in content.tensors if full.endswith(name)]:
            spoil(content, full, value)
        path = content.write(tmp_path / "model.gguf")
        with LLM(path, n_ctx=32, n_parallel=1, backend=backend) as llm:
            logits.append(llm.logits(list(range(20))))
    assert np.isfinite(logits[0]).all()
    assert np.array_equal(*logits)


def spoil(content: GGUFContent, name: str, value: float) -> int:
    """Set the first value of a tensor; the number of its values."""
    content.tensors[name] = content.tensors[name].clone()
    content.tensors[name].view(-1)[0] = value
    return content.tensors[name].numel()


def loading(done: int, total: int) -> None:
    raise AssertionError("weights were loaded")


def test_an_ordinary_last_layer_is_not_left_out_as_one_that_predicts_further_tokens(tmp_path: Path) -> None:
    content = to_gguf(GLM4MOE.build())
    content.metadata["glm4moe.nextn_predict_layers"] = 1
    path = content.write(tmp_path / "model.gguf")
    with pytest.raises(
        ModelError, match=r"'blk.2.nextn.eh_proj.weight' is missing, but .*nextn_predict_layers is 1"
    ):
        LLM(path, n_ctx=64, progress=loading)


def test_a_file_may_leave_out_the_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    content = with_nextn(GLM4MOE)
    for name in [name for name in content.tensors if name.startswith("blk.2.")]:
        del content.tensors[name]
    path = content.write(tmp_path / "model.gguf")
    assert read_params(read_spec(path)).n_nextn == 0
    with pytest.raises(RequestError, match="no multi-token prediction layer"):
        LLM(path, n_ctx=64, spec="mtp", progress=loading)
