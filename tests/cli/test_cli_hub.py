"""`motley run -hf`, `pull`, `list` and `rm`, against a stand-in of the hub over HF_ENDPOINT."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hub_machine import Machine

from motley.cli.hub_names import HubName, choose, find_models, parse_name, quant_of
from motley.errors import ConfigError


def test_a_model_is_downloaded_run_listed_and_removed(machine: Machine) -> None:
    command = [
        sys.executable,
        "-m",
        "motley",
        "run",
        "-hf",
        "ada/tiny-GGUF",
        "-p",
        "Hello",
        "-n",
        "2",
        "-t",
        "1",
    ]
    first = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=machine.environment(HF_TOKEN="hf_x"),
    )
    assert first.returncode == 0, first.stderr
    assert "ada/tiny-GGUF: Q4_K_M" in first.stderr
    ours = [request for request in machine.hub.requests if "ada/" in request[1]]
    assert {authorization for *_, authorization in ours} == {"Bearer hf_x"}
    n_gets = sum(method == "GET" and "resolve" in path for method, path, *_ in machine.hub.requests)
    assert n_gets == 1
    listed, again, removed, empty = machine.motley(
        ["list", "--json"],
        ["run", "-hf", "ada/tiny-GGUF:q4_k_m", "-p", "Hello", "-n", "1", "--offline"],
        ["rm", "ada/tiny-GGUF:Q4_K_M"],
        ["list"],
    )
    (row,) = json.loads(listed.stdout)
    assert row["name"] == "ada/tiny-GGUF:Q4_K_M"
    assert Path(row["files"][0]).parent.parent.parent.parent == machine.folder / "hub"
    assert again.code == 0, again.stderr
    assert "Deleted ada/tiny-GGUF:Q4_K_M: 14." in removed.stderr
    assert "There are no models yet" in empty.stderr
    assert not list(machine.folder.rglob("blobs/*"))
    assert sum(method == "GET" and "resolve" in path for method, path, *_ in machine.hub.requests) == n_gets


def test_what_is_wrong_is_said_with_what_there_is(machine: Machine) -> None:
    outcomes = machine.motley(
        ["pull", "ada/tiny-GGUF:Q5_0"],
        ["pull", "ada/nobody-GGUF"],
        ["pull", "ada/empty"],
        ["pull", "ada/secret-GGUF"],
        ["pull", "tiny"],
        ["run", "-hf", "ada/other-GGUF", "-p", "x", "--offline"],
        ["rm", "ada/tiny-GGUF"],
        ["run", "ada/tiny-GGUF", "-p", "x"],
        ["pull", "ada/tiny-GGUF", "--hf-file", "x.gguf"],
    )
    assert [outcome.code for outcome in outcomes] == [2] * len(outcomes)
    said = [outcome.stderr for outcome in outcomes]
    assert "ada/tiny-GGUF has no Q5_0\nhint: it has: Q4_K_M, Q8_0" in said[0]
    assert "the hub has no repository ada/nobody-GGUF" in said[1]
    assert "ada/empty has no GGUF files" in said[2]
    assert "ada/secret-GGUF is gated" in said[3]
    assert "'tiny' is not the name of a model on the hub" in said[4]
    assert "ada/other-GGUF is not in the cache folder" in said[5]
    assert "ada/tiny-GGUF is not in the cache folder" in said[6]
    assert "hint: -hf ada/tiny-GGUF downloads it" in said[7]
    assert "ada/tiny-GGUF has no file x.gguf\nhint: it has: tiny.Q4_K_M.gguf" in said[8]


def test_parts_come_together_and_only_once(machine: Machine) -> None:
    first, second = machine.motley(["pull", "ada/parts-GGUF"], ["pull", "ada/parts-GGUF:BF16"])
    assert first.code == 0, first.stderr
    path = Path(first.stdout.strip())
    assert path.name == "parts-BF16-00001-of-00002.gguf"
    assert (path.parent / "parts-BF16-00002-of-00002.gguf").exists()
    assert second.stdout == first.stdout
    assert sum(method == "GET" and "resolve" in path for method, path, *_ in machine.hub.requests) == 2


@pytest.mark.slow
def test_a_broken_download_is_continued(machine: Machine) -> None:
    machine.hub.cut_after = 12 << 20  # huggingface_hub writes portions of 10 MiB
    (outcome,) = machine.motley(["pull", "ada/tiny-GGUF"])
    if outcome.code:  # whether huggingface_hub tries again by itself differs by version
        assert "broke off" in outcome.stderr
        (outcome,) = machine.motley(["pull", "ada/tiny-GGUF"])
    assert outcome.code == 0, outcome.stderr
    whole = machine.hub.repos["ada/tiny-GGUF"]["tiny.Q4_K_M.gguf"]
    assert Path(outcome.stdout.splitlines()[-1]).read_bytes() == whole
    ranges = [wanted for _, _, wanted, _ in machine.hub.requests if wanted is not None]
    assert ranges == [f"bytes={10 << 20}-"]


@pytest.mark.slow
def test_a_file_with_another_checksum_is_deleted(machine: Machine) -> None:
    machine.hub.checksums["tiny.Q8_0.gguf"] = "0" * 64
    (outcome,) = machine.motley(["pull", "ada/tiny-GGUF:Q8_0"])
    assert outcome.code == 2
    assert "tiny.Q8_0.gguf does not have the hub's checksum, and was deleted" in outcome.stderr
    assert not list(machine.folder.rglob("*.gguf"))


@pytest.mark.slow
def test_without_a_network_the_cache_serves(machine: Machine) -> None:
    gone = "http://127.0.0.1:1"
    pulled, *_ = machine.motley(["pull", "ada/tiny-GGUF:Q8_0"])
    there, missing = machine.motley(
        ["pull", "ada/tiny-GGUF:Q8_0"], ["pull", "ada/parts-GGUF"], HF_ENDPOINT=gone
    )
    assert there.stdout == pulled.stdout
    assert "comes from the cache folder" in there.stderr
    assert missing.code == 2
    assert f"ada/parts-GGUF is not in the cache folder {machine.folder}" in missing.stderr
    (offline,) = machine.motley(["pull", "ada/tiny-GGUF:Q8_0"], HF_HUB_OFFLINE="1")
    assert offline.stdout == pulled.stdout


def test_names_and_quantizations() -> None:
    assert parse_name("a/b:Q4_0") == HubName("a/b", "Q4_0")
    assert parse_name("https://huggingface.co/a/b") == HubName("a/b")
    assert parse_name("a/b:latest") == HubName("a/b")
    for text in ("", "a", "a/b/c", "a/b:", "../b"):
        with pytest.raises(ConfigError):
            parse_name(text + " c" if text == "../b" else text)
    assert quant_of("x/Model-7B-Q4_K_M-00001-of-00003.gguf") == "Q4_K_M"
    assert quant_of("model.iq4_xs.gguf") == "IQ4_XS"
    assert quant_of("UD-Q2_K_XL/m-UD-Q2_K_XL.gguf") == "UD-Q2_K_XL"
    assert quant_of("model.gguf") == ""


def test_names_that_lead_out_of_the_folder_are_not_files() -> None:
    names = ["../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "a\\x.gguf", "a//x.gguf"]
    assert find_models(names) == []


def test_the_usual_quantization_is_preferred_and_incomplete_parts_are_left_out() -> None:
    files = ["m-Q8_0.gguf", "m-Q5_K_M.gguf", "m-Q2_K.gguf", "big-F16-00001-of-00003.gguf"]
    models = find_models(files)
    assert [model.quant for model in models] == ["Q2_K", "Q5_K_M", "Q8_0"]
    assert choose(HubName("a/b"), models).quant == "Q5_K_M"
    assert choose(HubName("a/b"), find_models(["only.gguf"])).files == ("only.gguf",)
    assert choose(HubName("a/b", "q2_k"), models).quant == "Q2_K"
