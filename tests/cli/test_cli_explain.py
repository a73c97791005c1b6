"""`motley explain`: the split of a model, without loading it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from motley.cli import app
from motley.gguf import ModelSpec

LAYERS = {
    "llama": 4,
    "qwen2": 3,
    "qwen3": 3,
    "phi3": 2,
    "gemma3": 6,
    "glm4moe": 3,
    "gpt-oss": 2,
    "qwen3moe": 3,
    "qwen3vlmoe": 2,
    "qwen3next": 4,
}


@pytest.fixture(autouse=True)
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(spec: ModelSpec, name: str) -> Any:
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr(ModelSpec, "tensor", refuse)


def explained(path: Path, *flags: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["explain", str(path), *flags, "--json"])
    assert result.exit_code == 0, result.output
    contents: dict[str, Any] = json.loads(result.output)
    return contents


@pytest.mark.parametrize("architecture", LAYERS)
def test_a_layer_needs_two_all_reduces_and_the_model_one_gather_with_experts_and_without(
    shared: Path, architecture: str
) -> None:
    path = shared / "golden" / architecture / "model.gguf"
    contents = explained(path, "--device", "cpu,cpu", "-sm", "tensor", "-ts", "1,1")
    assert contents["collectives"] == {"all_reduce": 2 * LAYERS[architecture], "all_gather": 1}
    rows = [row for section in contents["sections"] for row in section["collectives"]]
    assert len(rows) == sum(contents["collectives"].values())
    assert all("takes it" in row["reason"] and row["bytes_per_token"] > 0 for row in rows)
    assert sum(row["bytes_per_token"] for row in rows) == contents["bytes_per_token"]


def test_the_rotation_of_keys_and_values_is_shown_and_needs_no_word_between_devices(
    random_llama: Path,
) -> None:
    path = random_llama
    plain, rotated = (
        explained(path, "--device", "cpu,cpu", "-sm", "tensor", "-ctk", kind, "-ctv", kind)
        for kind in ("f16", "q4_0")
    )

    def n_activations(contents: dict[str, Any]) -> int:
        return sum(
            row["kind"] == "activation" for section in contents["sections"] for row in section["tensors"]
        )

    assert n_activations(rotated) > n_activations(plain)
    assert rotated["collectives"] == plain["collectives"]


def test_bytes_on_devices_follow_the_proportions(random_llama: Path) -> None:
    contents = explained(random_llama, "--device", "cpu,cpu", "-sm", "tensor", "-ts", "3,1")
    assert [d["asked"] for d in contents["devices"]] == [0.75, 0.25]
    assert contents["devices"][0]["achieved"] == pytest.approx(0.75, abs=0.03)
    weights = [t for section in contents["sections"] for t in section["tensors"] if t["kind"] == "weight"]
    for i, device in enumerate(contents["devices"]):
        assert sum(t["bytes"][i] for t in weights) == device["weights"]


def test_whole_layers_need_no_sums(random_llama: Path) -> None:
    contents = explained(random_llama, "--device", "cpu,cpu,cpu", "-sm", "layer")
    assert contents["collectives"] == {"send": 2, "broadcast": 1}


def test_the_table_names_layers_states_and_reasons(random_llama: Path) -> None:
    path = str(random_llama)
    output = CliRunner().invoke(app, ["explain", path, "--device", "cpu,cpu", "-sm", "tensor"]).output
    assert "blk.0.attn_q.weight" in output
    assert "split[0] 0²⁵⁶ 1²⁵⁶" in output
    assert (
        "all_reduce blk.0.after_attention: is partial, but rms_norm blk.0.ffn_norm takes it mirrored"
        in output
    )
    assert "blk.3: like a layer above" in output
    assert "8 all_reduce, 1 all_gather" in output


def test_the_picture_is_valid_and_has_a_colour_for_each_device(random_gemma3: Path, tmp_path: Path) -> None:
    path = str(random_gemma3)
    picture = tmp_path / "split.svg"
    flags = ["--device", "cpu,cpu,cpu", "-sm", "tensor", "-ts", "2,1,1", "--svg", str(picture)]
    assert CliRunner().invoke(app, ["explain", path, *flags]).exit_code == 0
    boxes = [e for e in ET.parse(picture).iter() if e.tag.endswith("rect")]
    assert len({box.get("fill") for box in boxes} - {"white"}) == 3


def test_what_cannot_be_meant_is_refused(random_llama: Path) -> None:
    path = str(random_llama)
    for flags, message in (
        (["--device", "cpu,tpu"], "unknown device 'tpu'"),
        (["--device", "cpu,cpu", "-sm", "rows"], "unknown split mode 'rows'"),
        (["--device", "cpu,cpu", "-ts", "1,2,3"], "has 3 numbers, but the number of devices is 2"),
        (["--device", "cpu,cpu", "-ts", "0,0"], "is not a proportion"),
        (["--svg", "no/such/folder/split.svg"], "hint: FILE must be in a writable folder"),
    ):
        result = CliRunner().invoke(app, ["explain", path, *flags])
        assert result.exit_code == 2
        assert message in result.output
