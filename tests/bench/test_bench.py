"""Measuring: what is written runs, what is timed is what was asked for, figures add up."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from motley import LLM
from motley.backends.cpu.slabs import Slabs
from motley.bench import Measurement, Workload, bandwidth, measure, random_model, shapes, write_random_model
from motley.bundled import bundled_draft_path
from motley.cli import app
from motley.errors import ConfigError
from motley.runtime import crew
from random_models import LLAMA

TINY = shapes.Shape(2, 64, 128, 4, 2, 32, 300, n_ctx=512)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(random_model, "SHAPES", {"tiny": TINY})
    file = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    write_random_model(file, "tiny", "Q8_0")
    monkeypatch.undo()
    return file


def test_a_random_model_runs_and_its_values_are_of_ordinary_size(path: Path) -> None:
    with LLM(path, n_ctx=64) as llm:
        logits = llm.logits([5, 6, 7, 8])
    assert logits.shape == (4, 300)
    assert 0.05 < np.std(logits) < 20


def test_every_workload_is_timed_as_often_as_asked(path: Path) -> None:
    with LLM(path, n_ctx=128, n_parallel=1) as llm:
        results = measure(llm, [Workload(16, True), Workload(3, False, 64)], repetitions=2)
        assert [len(m.seconds) for m in results] == [2, 2]
        assert all(m.rate > 0 and m.spread >= 0 for m in results)
        per_token = 2 * 2 * (32 * 2 + 32 * 2)  # layers, heads, K and V of 32 dims in f16
        matrices = 2 * 64 * (128 + 64 + 64 + 128 + 3 * 128) + 64 * 300 + 64  # with one row of the embedding
        norms = 5 * 64 * 4
        assert results[1].bytes_per_token == matrices * 34 // 32 + norms + int(65.5 * per_token)
        assert llm.kv_stats().use.n_sequences == 0


def test_a_file_without_a_tokenizer_is_measured(tmp_path: Path) -> None:
    path = LLAMA.write(tmp_path / "ids.gguf", has_tokenizer=False)
    flags = ["-p", "16", "-n", "3", "-r", "1", "-c", "512", "--device", "cpu", "--json"]
    outcome = CliRunner().invoke(app, ["bench", str(path), *flags, "--spec", "lookup"])
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(outcome.stdout)
    assert [row["n_tokens"] for row in report["rows"]] == [16, 3]
    assert [row["n_tokens"] for row in report["speculation"]] == [3]


def test_what_depth_is_filled_with_is_found_by_nobody(path: Path) -> None:
    with LLM(path, n_ctx=128, n_parallel=2) as llm:
        alone = llm.generate([0] * 40, max_tokens=4, temperature=0).tokens
        with llm.raw_sequence() as sequence:
            sequence.fill_with_random(64)
        with LLM(path, n_ctx=128, n_parallel=2) as fresh:
            assert fresh.generate([0] * 40, max_tokens=4, temperature=0).tokens == alone
        assert llm.generate([0] * 40, max_tokens=4, temperature=0).tokens == alone


def test_decoding_follows_the_likeliest_token(path: Path) -> None:
    with LLM(path, n_ctx=128) as llm, llm.raw_sequence() as a, llm.raw_sequence() as b:
        token = 5
        for _ in range(4):
            following = int(a.feed([token]).argmax())
            assert b.follow(token) == following
            token = following


def test_the_roofline_counts_bytes_that_had_to_be_read() -> None:
    decoding = Measurement(Workload(10, False), (2.0, 1.0, 1.0), bytes_per_token=500)
    assert decoding.rate == 10
    assert decoding.roofline_percent(bandwidth=10_000) == 50
    assert Measurement(Workload(10, True), (1.0,), 500).roofline_percent(10_000) is None


@pytest.mark.parametrize(
    ("devices", "mode", "expected"),
    [
        ("cpu", None, 10.0),
        ("cpu,cpu", "tensor", 10.0),  # two devices, one memory
        ("cpu,cuda:0,cuda:0", "tensor", 50.0),  # together
        ("cpu,cuda:0", "layer", 16.0),  # one after the other, half of the weights each
    ],
)
def test_a_crews_bandwidth_is_that_of_its_hardware(
    devices: str, mode: str | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "cpu_bandwidth", lambda n_threads: 10.0)
    monkeypatch.setattr(bandwidth, "gpu_bandwidth", lambda name: 40.0)
    monkeypatch.setattr(crew, "known_devices", lambda: ("cpu", "cuda:0"))
    assert bandwidth.read_bandwidth(crew.make_crew(devices, mode)) == pytest.approx(expected)


def test_all_threads_of_the_cpu_devices_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(bandwidth, "cpu_bandwidth", lambda n_threads: asked.append(n_threads) or 1.0)
    bandwidth.read_bandwidth(crew.make_crew("cpu,cpu", "tensor"), n_threads=6)
    assert asked == [6]


@pytest.mark.parametrize("is_native", [False, True])
def test_more_threads_than_cores_take_no_more_memory(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_native and not bandwidth.is_available():
        pytest.skip("the native module is not built")
    monkeypatch.setattr(bandwidth, "is_available", lambda: is_native)
    monkeypatch.setattr(bandwidth, "_CPU_BYTES", 2**23)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    n_bytes = 0
    ones = torch.ones

    def count(*shape: int, **options: Any) -> torch.Tensor:
        nonlocal n_bytes
        made = ones(*shape, **options)
        n_bytes += made.nbytes
        return made

    def count_taken(slabs: Slabs, n_taken: int) -> torch.Tensor:
        nonlocal n_bytes
        n_bytes += n_taken
        return take(slabs, n_taken)

    take = Slabs.take
    monkeypatch.setattr(torch, "ones", count)
    monkeypatch.setattr(Slabs, "take", count_taken)
    assert bandwidth.cpu_bandwidth(10**9) > 0
    assert 2 * 2**23 <= n_bytes < 2.5 * 2**23  # a share for each core, and a vector


def test_the_cpus_bandwidth_is_the_best_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    if not bandwidth.is_available():
        pytest.skip("the native module is not built")
    monkeypatch.setattr(bandwidth, "measure", lambda *_, **__: {"one": 3.0, "best": 7.0, "other": 5.0})
    assert bandwidth.cpu_bandwidth(1) == 7.0


def test_random_models_of_several_formats_are_kept_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(random_model, "SHAPES", {"tiny": TINY})
    command = ["bench", "--shape", "tiny", "--weights", "q8_0,F16", "-p", "0", "-n", "1", "-r", "1"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    assert [row["weights"] for row in json.loads(result.stdout)["rows"]] == ["Q8_0", "F16"]
    kept = sorted(path.name for path in (tmp_path / "motley").iterdir())
    assert kept == ["random-tiny-F16.gguf", "random-tiny-Q8_0.gguf"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert {path.name for path in (tmp_path / "motley").iterdir()} == set(kept)


def test_a_model_that_could_not_be_written_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(random_model, "_pieces", fail)
    result = CliRunner().invoke(app, ["bench", "--shape", "llama-15m"])
    assert result.exit_code == 2
    assert "No space left" in result.output
    assert list((tmp_path / "motley").iterdir()) == []


def test_the_command_gives_a_row_for_each_type_and_workload(path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "speed.svg"
    flags = [
        "-p",
        "8",
        "-n",
        "2",
        "-d",
        "0,32",
        "--types",
        "f16,q8_0/q4_0",
        "-r",
        "1",
        "--plot",
        str(picture),
    ]
    result = CliRunner().invoke(app, ["bench", str(path), *flags, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    rows = found["rows"]
    assert found["device"] == "cpu"
    assert found["hardware"]
    assert found["bandwidth"] > 0
    assert [(r["type_k"], r["type_v"], r["test"]) for r in rows][:2] == [
        ("f16", "f16", "pp8"),
        ("f16", "f16", "tg2"),
    ]
    assert len(rows) == 8
    assert rows[-1]["test"] == "tg2 @ d32"
    assert len([e for e in ET.parse(picture).iter() if e.tag.endswith("circle")]) == 4


def test_types_of_k_and_v_can_be_said_apart(path: Path) -> None:
    flags = ["-p", "0", "-n", "1", "-r", "1", "-ctk", "f16,q8_0", "-ctv", "q4_0", "--json"]
    result = CliRunner().invoke(app, ["bench", str(path), *flags])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(r["type_k"], r["type_v"]) for r in rows] == [("f16", "q4_0"), ("q8_0", "q4_0")]


def test_what_cannot_be_measured_is_refused(path: Path) -> None:
    for flags, message in (
        (["-n", "0", "-p", "0"], "nothing to measure"),
        (["-d", "x"], "is not a list of numbers"),
        (["--types", "f16", "-ctk", "q8_0"], "beside -ctk"),
        (["--shape", "llama-15m"], "two models"),
    ):
        result = CliRunner().invoke(app, ["bench", str(path), *flags])
        assert result.exit_code == 2
        assert message in result.output
    with pytest.raises(ConfigError, match="unknown shape"):
        write_random_model(path, "llama-1000b")


@pytest.mark.slow
def test_drafters_are_compared_with_none(path: Path, bundled: Path) -> None:
    words = ["bench", str(bundled), "-p", "0", "-n", "12", "-r", "1", "--json"]
    found = CliRunner().invoke(app, [*words, "--spec", "lookup,draft", "-md", str(bundled_draft_path())])
    assert found.exit_code == 0, found.output
    (row,) = json.loads(found.stdout)["speculation"]
    assert row["drafters"] == "lookup,draft"
    assert row["tokens_per_second"] > 0 < row["tokens_per_second_without"]
    assert row["ratio"] == pytest.approx(row["tokens_per_second"] / row["tokens_per_second_without"])
    shown = CliRunner().invoke(app, [*words[:-1], "--spec", "auto"])
    assert shown.exit_code == 0
    assert "speculation" in shown.stdout
    assert "speculation" not in json.loads(CliRunner().invoke(app, words).stdout)
    for wrong, why in (
        (["--spec", "telepathy"], "there is no drafter 'telepathy'"),
        (["--spec", "draft"], "there is no draft model"),
        (["-md", str(path)], "-md is for --spec"),
        (["--spec", "auto", "-n", "1,8"], "the tokens after the first"),
        (["--spec", "auto", "-n", "0", "-p", "8"], "the tokens after the first"),
        (["--spec", "draft", "-md", str(path)], "another vocabulary"),
    ):
        refused = CliRunner().invoke(app, [*words, *wrong])
        assert refused.exit_code != 0
        assert why in refused.output + refused.stderr
