"""A device loads the weights of every batch: with fewer layers, with hidden states for results, of any size.

Where one device alone has the last layers, the others need the output norm only if fewer layers run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley import LLM
from motley.gguf import read_spec
from motley.models import BatchShape, GraphOptions, read_params
from motley.runtime import ModelSplit, make_crew
from motley.runtime.loading import lookup_tables

CREWS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tensor_split": "7,20"}),
    ("gemma3", {"tensor_split": "1,20"}),
    ("glm4moe", {"tensor_split": "7,0,2,2", "split_experts": "ffn"}),
    ("gpt-oss", {"tensor_split": "1,3", "split_experts": "whole"}),
    ("qwen3moe", {"tensor_split": "1,1,1,1,1,1,1,1,1"}),  # more devices than heads or columns
    ("qwen3moe", {"tensor_split": "20,1", "n_cpu_moe": 1, "expert_split": "1,3"}),
    ("qwen3next", {"tensor_split": "3,1", "n_cpu_moe": 2}),
    ("qwen3vlmoe", {"tensor_split": "1,0,3", "split_experts": "ffn"}),
    ("qwen3vlmoe", {"tensor_split": "1,0,3", "split_mode": "layer"}),
    ("qwen3vlmoe", {"tensor_split": "20,0,20,3", "split_experts": "ffn", "groups": "(cpu,cpu),(cpu,cpu)"}),
    ("qwen3moe", {"tensor_split": "3,20,1,20", "n_cpu_moe": 1, "groups": "(cpu,cpu),(cpu,cpu)"}),
]


def devices(options: dict[str, Any]) -> str:
    return ",".join(["cpu"] * len(options["tensor_split"].split(",")))


@pytest.mark.parametrize(("name", "options"), CREWS, ids=lambda value: str(value))
def test_no_batch_needs_a_weight_that_a_batch_of_one_token_does_not(
    shared: Path, name: str, options: dict[str, Any]
) -> None:
    spec = read_spec(shared / "golden" / name / "model.gguf")
    params = read_params(spec)
    rest = {key: value for key, value in options.items() if key != "groups"}
    if "groups" in options:
        crew = make_crew(options["groups"], **rest)
    else:
        crew = make_crew(devices(options), **({"split_mode": "tensor"} | rest))
    split = ModelSplit(spec, params, crew, GraphOptions(64))
    for device in range(len(crew)):
        loaded = split.share(device, BatchShape(1, 1)).layouts
        tables = lookup_tables(split.share(device, BatchShape(1, 1)).graph)
        assert {table.name for table in tables} <= {
            "token_embd.weight"
        }  # all others are loaded to the device
        for n_layers in range(params.n_layers):
            for batch in (
                BatchShape(1, 1, n_layers),
                BatchShape(40, 1, n_layers),
                BatchShape(7, 3, n_layers, wants_hidden=True),
                BatchShape(7, 3, n_layers, keeps_hidden=True),
            ):
                assert split.share(device, batch).layouts.items() <= loaded.items(), (device, batch)


@pytest.mark.parametrize("backend", ["reference", "cpu-exact"])
@pytest.mark.parametrize("shares", [(1, 3), (1, 0, 3)])
def test_such_crews_exit_early_and_embed_as_one_device_does(
    shared: Path, shares: tuple[int, ...], backend: str
) -> None:
    path, tokens = shared / "golden" / "qwen3vlmoe" / "model.gguf", list(range(30))
    settings: dict[str, Any] = {
        "backend": backend,
        "n_ctx": 64,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
    }
    crew = {"devices": ["cpu"] * len(shares), "split_mode": "tensor", "tensor_split": shares}
    with LLM(path, **settings) as one, LLM(path, **settings, **crew, split_experts="ffn") as several:
        for effort in ({"n_layer_exit": 1}, {}):
            difference = np.abs(several.logits(tokens, **effort) - one.logits(tokens, **effort)).max()
            assert difference <= 1e-3
        np.testing.assert_allclose(several.embed(tokens), one.embed(tokens), atol=1e-5)
