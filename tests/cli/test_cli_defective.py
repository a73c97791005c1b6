"""Files whose metadata and tensors disagree: `run` refuses them, and `inspect` says the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

import gguf
from random_models import LLAMA, N_EMBD, RandomModel

Motley = Callable[..., Result]
SMALL = replace(LLAMA, n_layers=2)


def write(folder: Path, keys: dict[str, Any], extra: dict[str, tuple[int, ...]] | None = None) -> str:
    """The small model with other metadata, and with tensors that the architecture does not have."""

    class Changed(RandomModel):
        def _shapes(self) -> dict[str, tuple[int, ...]]:
            return super()._shapes() | (extra or {})

    model = Changed("llama", SMALL.n_layers, SMALL.n_heads, SMALL.n_kv_heads, SMALL.keys | keys)
    return str(model.write(folder / "model.gguf"))


@pytest.mark.parametrize(
    ("keys", "extra", "problem"),
    [
        ({"block_count": 1}, {}, "llama.block_count is 1, but the file has tensors of 2 layers"),
        ({"block_count": 3}, {}, "llama.block_count is 3, but the file has tensors of 2 layers"),
        ({"attention.head_count": 0}, {}, "llama.attention.head_count is 0, but must be at least 1"),
        ({"context_length": 2**32 - 1}, {}, "llama.context_length is 4294967295, but must be at most"),
        ({"embedding_length": 512}, {}, "has shape (320, 256), but the model's metadata asks for (320, 512)"),
        ({}, {"blk.1.attn_q_norm.weight": (64,)}, "models have no 'blk.1.attn_q_norm.weight'"),
        ({"rope.dimension_count": 7}, {}, "llama.rope.dimension_count is 7"),
    ],
)
def test_what_run_refuses_inspect_explains(
    motley: Motley, tmp_path: Path, keys: dict[str, Any], extra: dict[str, tuple[int, ...]], problem: str
) -> None:
    path = write(tmp_path, keys, extra)
    result = motley("run", path, "-p", "x", "-n", "1")
    assert result.exit_code == 2
    error = re.search("error: (.*)", result.stderr)
    assert error is not None
    assert problem in error[1]
    contents = json.loads(motley("inspect", path, "--json").stdout)
    assert (contents["runs"], contents["problem"]) == (False, error[1])
    shown = motley("inspect", path)
    assert shown.exit_code == 0
    assert "why not" in shown.stdout


def test_another_architecture_is_shown_and_said_not_to_run(motley: Motley, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tensor("output.weight", np.zeros((6, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    contents = json.loads(motley("inspect", str(tmp_path / "other.gguf"), "--json").stdout)
    assert not contents["runs"]
    assert "architecture 'mamba' is not supported" in contents["problem"]
    assert "llama" in contents["hint"]


def test_a_file_that_runs_is_said_to_run(motley: Motley, random_llama: Path) -> None:
    contents = json.loads(motley("inspect", str(random_llama), "--json").stdout)
    assert (contents["runs"], contents["problem"], contents["notes"]) == (True, None, [])


def test_other_tensors_that_nothing_reads_are_noted(motley: Motley, tmp_path: Path) -> None:
    path = write(tmp_path, {}, {"cls.weight": (3, N_EMBD), "rope_freqs.weight": (32,)})
    note = "the file has tensors that are not used: 'cls.weight'"
    assert json.loads(motley("inspect", path, "--json").stdout)["notes"] == [note]
    result = motley("run", path, "-p", "x", "-n", "1")
    assert result.exit_code == 0, result.output
    assert f"note: {note}" in result.stderr


@pytest.mark.parametrize(
    ("shape", "limit"),
    [
        (replace(SMALL, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=544), "heads of 544 dims"),
        (
            replace(SMALL, n_layers=1, n_heads=66, n_kv_heads=1, head_dim=16),
            "66 query heads for each KV head",
        ),
    ],
)
def test_heads_beyond_the_kernels_run_on_the_reference_or_are_refused(
    motley: Motley, tmp_path: Path, shape: RandomModel, limit: str
) -> None:
    path = str(shape.write(tmp_path / "model.gguf"))
    result = motley("run", path, "-p", "the", "-n", "3", "--temp", "0", "-c", "64")
    assert result.exit_code == 0, result.output
    assert "note: cpu runs on --backend reference, which is slow: " + limit in result.stderr
    same = motley("run", path, "-p", "the", "-n", "3", "--temp", "0", "-c", "64", "--backend", "reference")
    assert same.stdout == result.stdout
    refused = motley("run", path, "-p", "the", "-n", "3", "--backend", "cpu")
    assert refused.exit_code == 2
    assert f"error: cpu: {limit}, but native kernels have at most" in refused.stderr
    assert "loaded" not in refused.stderr
