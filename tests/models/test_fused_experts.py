"""Files that store the experts' gates and ups as one tensor answer as those that store two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hf_to_gguf import GGUFContent, to_gguf
from tiny_models import GPT_OSS, QWEN3MOE, TinyModel

from motley import LLM
from motley.errors import ModelError
from motley.formats import PackedTensor, get_format
from motley.gguf import read_spec
from motley.models import check_tensors, read_params

TOKENS = [3, 250, 17, 42, 99, 7, 130, 18]


def packed(content: GGUFContent) -> GGUFContent:
    """The same with experts in Q8_0: rows of whole blocks, as real files have."""
    tensors = {
        name: PackedTensor.pack(value, get_format("Q8_0")) if name.endswith("_exps.weight") else value
        for name, value in content.tensors.items()
    }
    return GGUFContent(content.architecture, dict(content.metadata), tensors)


def fused(content: GGUFContent) -> GGUFContent:
    """The same with gates and ups joined, gates first."""
    tensors = dict(content.tensors)
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        gate, up = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        if isinstance(gate, PackedTensor):
            both = PackedTensor(torch.cat([gate.data, up.data], 1), gate.format)
        else:
            both = torch.cat([gate, up], 1)
        tensors[name.replace("gate", "gate_up")] = both
    return GGUFContent(content.architecture, dict(content.metadata), tensors)


@pytest.fixture(scope="module", params=[QWEN3MOE, GPT_OSS], ids=lambda model: model.name)
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in two files: with two tensors, and with one."""
    model: TinyModel = request.param
    folder = tmp_path_factory.mktemp("fused")
    content = packed(to_gguf(model.build()))
    joined = fused(content)
    assert len(joined.tensors) < len(content.tensors)
    return content.write(folder / "two.gguf"), joined.write(folder / "one.gguf")


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "reference"},
        {"backend": "auto"},
        {"backend": "auto", "devices": "cpu,cpu", "split_mode": "tensor", "split_experts": "whole"},
        {"backend": "auto", "devices": "cpu,cpu", "split_mode": "tensor", "split_experts": "ffn"},
        {"backend": "reference", "devices": "cpu,cpu", "split_mode": "layer"},
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_logits_and_bytes_are_the_same(paths: tuple[Path, Path], options: dict[str, str]) -> None:
    logits, memory = [], []
    for path in paths:
        with LLM(path, n_ctx=32, n_parallel=1, **options) as llm:  # type: ignore[arg-type]
            logits.append(llm.logits(TOKENS))
            memory.append((llm.device_memory(), llm.token_bytes()))
    np.testing.assert_array_equal(*logits)
    assert memory[0] == memory[1]


def test_both_at_once_are_refused(paths: tuple[Path, Path], tmp_path: Path) -> None:
    content = packed(to_gguf(QWEN3MOE.build()))
    content.tensors["blk.0.ffn_gate_up_exps.weight"] = fused(content).tensors["blk.0.ffn_gate_up_exps.weight"]
    spec = read_spec(content.write(tmp_path / "model.gguf"))
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        check_tensors(spec, read_params(spec))


def test_a_fused_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    content = fused(to_gguf(QWEN3MOE.build()))
    content.tensors["blk.1.ffn_gate_up_exps.weight"] = torch.ones(8, 32, 64)
    spec = read_spec(content.write(tmp_path / "model.gguf"))
    with pytest.raises(ModelError, match=r"gate_up_exps.weight' has shape \(8, 32, 64\).*\(8, 64, 64\)"):
        check_tensors(spec, read_params(spec))
