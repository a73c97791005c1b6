"""The description of a model: plain data, with the figures that people look for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType, GGUFValueType
from raw_gguf import ARCHITECTURE, array, gguf_file, key, small_model, string, tensor

from motley.gguf import ModelSpec, describe, read_spec


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_model())
    return read_spec(path)


def test_totals(spec: ModelSpec) -> None:
    description = describe(spec)
    assert description["architecture"] == "llama"
    assert description["name"] == "naïve 名前"
    assert description["parameters"] == 8 + 128 + 256
    assert description["bytes"] == 32 + 72 + 144
    assert description["bits_per_weight"] == pytest.approx(8 * 248 / 392, abs=1e-4)
    assert description["files"][0]["bytes"] == spec.path.stat().st_size


def test_types_come_by_bytes(spec: ModelSpec) -> None:
    rows = describe(spec)["types"]
    assert [(row["type"], row["tensors"], row["bytes"]) for row in rows] == [
        ("Q4_K", 1, 144),
        ("Q4_0", 1, 72),
        ("F32", 1, 32),
    ]
    assert rows[0]["bits_per_weight"] == 4.5


def test_tensors_are_listed_in_file_order(spec: ModelSpec) -> None:
    rows = describe(spec)["tensors"]
    assert [(row["name"], row["shape"], row["type"]) for row in rows] == [
        ("a", [2, 4], "F32"),
        ("b", [2, 1, 64], "Q4_0"),
        ("c", [256], "Q4_K"),
    ]


def test_long_arrays_are_summarised_and_short_ones_shown(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    words = array(GGUFValueType.STRING, 100, b"".join(string(str(i)) for i in range(100)))
    numbers = array(GGUFValueType.INT8, 3, b"\x01\x02\xff")
    keys = [
        ARCHITECTURE,
        key("words", GGUFValueType.ARRAY, words),
        key("numbers", GGUFValueType.ARRAY, numbers),
    ]
    path.write_bytes(gguf_file(keys))
    metadata = describe(read_spec(path))["metadata"]
    assert metadata["numbers"] == [1, 2, -1]
    assert metadata["words"] == {"count": 100, "of": "strings", "first": [str(i) for i in range(8)]}


def test_a_type_that_is_not_supported_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file(tensors=[tensor("a", (256,), GGMLQuantizationType.TQ1_0)], data=bytes(54)))
    (row,) = describe(read_spec(path))["types"]
    assert (row["type"], row["is_supported"], row["bytes"]) == ("TQ1_0", False, 54)


def test_it_is_json_even_without_tensors_or_finite_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_file([key("nan", GGUFValueType.FLOAT32, b"\x00\x00\xc0\x7f")]))
    description = describe(read_spec(path))
    assert description["architecture"] is None
    assert description["bits_per_weight"] == 0
    assert json.loads(json.dumps(description, allow_nan=False)) == description
