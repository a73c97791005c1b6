"""`motley inspect` on a small file with everything in it that a table can stumble over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

import gguf

Motley = Callable[..., Result]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny [bold]\x1b[31m model")
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(1000)])
    writer.add_string("tokenizer.chat_template", "line one\nline two" + " more" * 500)
    writer.add_tensor("output.weight", np.zeros((6, 32), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(32, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_tables_show_metadata_and_types(motley: Motley, file: str) -> None:
    result = motley("inspect", file)
    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "parameters 224 (224)" in lines
    assert "weights 832 B, 29.71 bits per parameter" in lines
    assert "llama.attention.layer_norm_rms_epsilon 1e-05" in lines
    assert any(
        line.startswith('tokenizer.ggml.tokens 1,000 × strings: ["token0", "token1"') for line in lines
    )
    assert "F32 1 192 768 B 32.00" in lines
    assert "output.weight" not in result.stdout


def test_what_a_file_says_is_shown_and_not_obeyed(motley: Motley, file: str) -> None:
    result = motley("inspect", file)
    assert "Tiny [bold]\\x1b[31m model" in result.stdout
    assert "\x1b" not in result.stdout
    assert "line one\\nline two more" in result.stdout


def test_tensors_are_listed_on_request(motley: Motley, file: str) -> None:
    lines = [" ".join(line.split()) for line in motley("inspect", file, "--tensors").stdout.splitlines()]
    assert "output.weight 6 × 32 F32 768 B" in lines
    assert "output_norm.weight 32 F16 64 B" in lines


def test_json_holds_it_all(motley: Motley, file: str) -> None:
    contents = json.loads(motley("inspect", "-m", file, "--json").stdout)
    assert contents["architecture"] == "llama"
    assert contents["metadata"]["tokenizer.ggml.tokens"]["count"] == 1000
    assert [tensor["name"] for tensor in contents["tensors"]] == ["output.weight", "output_norm.weight"]


def test_a_damaged_file_is_an_error_with_exit_code_2(motley: Motley, file: str) -> None:
    with open(file, "r+b") as damaged:
        damaged.truncate(100)
    result = motley("inspect", file)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert file in result.stderr
