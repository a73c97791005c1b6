"""`llm.kv_stats()`: figures that anybody can check by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.by_hand import stepped_by_hand

from motley import LLM
from motley.errors import ConfigError
from motley.kvcache.types import CACHE_TYPES
from motley.runtime import KVStats

LAYERS, HEADS, DIM = 4, 2, 64  # of `random_llama`


@pytest.fixture(scope="module")
def path(random_llama: Path) -> Path:
    return random_llama


def open_llm(path: Path, **options: Any) -> LLM:
    plain = {"n_ctx": 256, "n_parallel": 2, "kv_block_size": 16, "backend": "reference"}
    return LLM(path, **(plain | options))


def stats_of(path: Path, **options: Any) -> KVStats:
    with open_llm(path, **options) as llm:
        return llm.kv_stats()


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with open_llm(path) as llm:
        yield llm


def test_an_idle_cache_is_all_layout(path: Path) -> None:
    stats = stats_of(path)
    assert (stats.n_blocks, stats.n_blocks_used, stats.n_tokens, stats.waste_percent) == (32, 0, 0, 0)
    per_token = LAYERS * HEADS * DIM * 2 * 2  # K and V, f16
    assert stats.layout.bytes_per_token == stats.layout.bytes_per_token_allocated == per_token
    assert stats.layout.context_bytes == 256 * per_token
    assert [(d.device, d.reserved, d.resident) for d in stats.devices] == [
        ("cpu", 512 * per_token, 512 * per_token)
    ]


def test_blocks_tokens_and_waste_follow_a_running_request(llm: LLM) -> None:
    with stepped_by_hand(llm) as step:
        stream = llm.stream(list(range(3, 53)), max_tokens=5, temperature=0, ignore_eos=True)
        step(1)
        stats = llm.kv_stats()
        assert stats.n_tokens == 50
        assert stats.n_blocks_used == 4
        assert stats.waste_percent == pytest.approx(100 * (64 - 50) / 64)
        stream.close()
        after = llm.kv_stats()
    assert (after.n_blocks_used, after.n_tokens) == (0, 0)
    assert after.use.groups[0].n_cached == 4


def test_a_second_request_with_the_same_prompt_shares_blocks_and_is_a_hit(llm: LLM) -> None:
    prompt = list(range(100, 164))
    with stepped_by_hand(llm) as step:
        first = llm.stream(prompt, max_tokens=9, temperature=0, ignore_eos=True)
        step(1)
        before = llm.kv_stats().use.prefix
        second = llm.stream(prompt, max_tokens=9, temperature=0, ignore_eos=True)
        step(1)
        stats = llm.kv_stats()
    assert stats.n_blocks_shared == 3
    assert stats.use.prefix.n_queries == before.n_queries + 1
    # All but the last, whose logits are wanted.
    assert stats.use.prefix.n_hit_tokens - before.n_hit_tokens == 63
    first.close()
    second.close()


def test_a_crew_s_devices_add_up_to_one_device(path: Path) -> None:
    alone = stats_of(path)
    crew = stats_of(path, devices="cpu,cpu", split_mode="tensor", tensor_split=(1, 1))
    assert [d.device for d in crew.devices] == ["cpu#0", "cpu#1"]
    assert sum(d.reserved for d in crew.devices) == alone.devices[0].reserved
    assert crew.layout.bytes_per_token == alone.layout.bytes_per_token
    assert crew.layout.bytes_per_token_allocated == alone.layout.bytes_per_token_allocated


def test_kv_heads_that_are_stored_twice_show_in_the_allocated_bytes(path: Path) -> None:
    crew = stats_of(path, devices="cpu,cpu,cpu,cpu", split_mode="tensor")
    assert crew.layout.bytes_per_token_allocated == 2 * crew.layout.bytes_per_token


def test_types_are_compared_at_one_context_and_in_one_budget(path: Path) -> None:
    layout = stats_of(path, kv_cache_bytes=512 * 1024).layout
    rows = {row.name: row for row in layout.types}
    assert list(rows) == list(CACHE_TYPES)
    assert rows["q8_0"].bytes_per_token == LAYERS * HEADS * DIM * 2 * 34 / 32
    assert rows["f32"].context_bytes == 2 * rows["f16"].context_bytes == 256 * 4096
    assert layout.budget == 512 * 1024
    assert rows["f32"].longest_context == 128
    assert rows["f16"].longest_context == layout.longest_context == 256
    assert rows["q4_0"].longest_context == 512 * 1024 // (16 * 576) * 16


def test_a_mixed_pair_lies_between_its_types(path: Path) -> None:
    layout = stats_of(path, cache_type_k="q8_0", cache_type_v="q4_0").layout
    rows = {row.name: row for row in layout.types}
    assert layout.bytes_per_token == (rows["q8_0"].bytes_per_token + rows["q4_0"].bytes_per_token) / 2
    assert (layout.k_rotation, layout.v_rotation) == (64, 64)


def test_windows_cost_their_window_and_no_context(random_gemma3: Path) -> None:
    """gemma3: five of six layers see 32 tokens."""
    path = random_gemma3
    options = {"kv_block_size": 16, "n_batch": 16, "n_parallel": 1}
    short, long = (stats_of(path, n_ctx=n, **options).layout for n in (512, 1024))
    assert [(g.name, g.n_layers, g.n_blocks) for g in long.groups] == [("full", 1, 64), ("window 32", 5, 4)]
    assert long.context_bytes - short.context_bytes == 512 * long.bytes_per_token / 6


def test_a_limit_in_tokens_is_never_exceeded(path: Path) -> None:
    assert stats_of(path, kv_cache_tokens=47).n_blocks == 2
    with pytest.raises(ConfigError, match="15 tokens is smaller than a block of 16"):
        open_llm(path, kv_cache_tokens=15)


def test_where_paging_on_demand_is_impossible_a_notice_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("motley.runtime.notices", "motley.runtime.caching"):
        monkeypatch.setattr(f"{module}.can_page_on_demand", lambda device: False)
    with open_llm(path, kv_cache_demand_paged=True) as llm:
        assert any("not demand-paged" in notice for notice in llm.notices)
        (device,) = llm.kv_stats().devices
        assert device.resident == device.reserved
    with open_llm(path) as llm:
        assert llm.notices == ()
