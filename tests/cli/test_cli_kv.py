"""`motley kv`: the cache of a model, planned without its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from motley.runtime import budget

Motley = Callable[..., Result]


@pytest.fixture
def path(random_llama: Path) -> str:
    return str(random_llama)


def test_a_plan_as_tables(motley: Motley, path: str) -> None:
    result = motley("kv", path, "-c", "1024", "-ctk", "q8_0", "-ctv", "q4_0")
    assert result.exit_code == 0, result.output
    assert "K q8_0 (rotated by 64), V q4_0 (rotated by 64), blocks of 32 tokens" in result.stdout
    assert "a token takes 832 bytes by the table of types, 832 as allocated" in result.stdout
    assert "a context of 1024 tokens takes 832.0 KiB" in result.stdout
    assert "longest context in 832.0 KiB" in result.stdout


def test_json_has_every_figure_for_programs(motley: Motley, path: str) -> None:
    crew = ("--device", "cpu,cpu", "-sm", "tensor", "--kv-cache-demand-paged", "-np", "2")
    result = motley("kv", path, "-c", "512", *crew, "--json")
    contents = json.loads(result.stdout)
    assert contents["n_ctx"] == 512
    assert [d["device"] for d in contents["devices"]] == ["cpu#0", "cpu#1"]
    assert sum(d["reserved"] for d in contents["devices"]) == 2 * contents["context_bytes"] == 2 << 20
    assert [d["resident"] for d in contents["devices"]] == [0, 0]
    assert {row["name"] for row in contents["types"]} >= {"f16", "q8_0", "iq4_nl"}


def test_a_cache_may_be_planned_for_a_larger_machine(
    motley: Motley, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "host_bytes", lambda: 4096)
    result = motley("kv", path, "-c", "1024")
    assert result.exit_code == 0, result.output
    assert "a context of 1024 tokens takes 2.0 MiB" in result.stdout


def test_a_cache_that_cannot_be_is_refused_with_a_hint(motley: Motley, path: str) -> None:
    for flags, message in (
        (("--kv-cache-bytes", "1KiB"), "may take 1.0 KiB over all"),
        (("--kv-cache-bytes", "9" * 5000), "is not an amount of memory"),
        (("--backend", "quantum"), "unknown backend 'quantum'"),
    ):
        result = motley("kv", path, *flags)
        assert result.exit_code == 2
        assert message in result.stderr
        assert "hint:" in result.stderr
