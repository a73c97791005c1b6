"""A cache that is larger than the machine is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley import LLM
from motley.errors import CacheError
from motley.runtime import budget


@pytest.fixture
def path(random_llama: Path) -> Path:
    return random_llama


def test_a_cache_larger_than_the_machine_is_refused_with_numbers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "host_bytes", lambda: 2**20)
    with pytest.raises(CacheError, match=r"would take \d+\.\d MiB, but this machine has 1\.0 MiB"):
        LLM(path, n_ctx=4096)
    for options in ({"kv_cache_bytes": "1MiB"}, {"kv_cache_demand_paged": True}):
        with LLM(path, n_ctx=4096, **options) as llm:
            assert llm.generate("Once", max_tokens=2).tokens


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(budget, "_CONTAINER_LIMIT", limit)
    machine = budget.host_bytes()  # there is no such file yet
    assert machine is not None
    for text, expected in (("4096\n", 4096), ("max\n", machine), (str(2**80), machine)):
        limit.write_text(text)
        assert budget.host_bytes() == expected
