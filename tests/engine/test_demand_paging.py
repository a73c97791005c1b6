"""A demand-paged cache as `LLM` runs it: what the system counts as resident follows use up and down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.by_hand import stepped_by_hand

from motley import LLM
from motley.bundled import bundled_draft_path
from motley.engine.drafting.control import FixedControl
from motley.kvcache.paging import can_page_on_demand

TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # of `random_llama`: layers, KV heads, K and V, dim, f32
PROMPT = list(range(3, 300)) * 2
USED = len(PROMPT) * TOKEN_BYTES


@pytest.fixture
def llm(random_llama: Path) -> Iterator[LLM]:
    if not can_page_on_demand():
        pytest.skip("this system cannot page on demand")
    with LLM(
        random_llama,
        n_ctx=2048,
        cache_type_k="f32",
        cache_type_v="f32",
        kv_cache_demand_paged=True,
        prefix_cache=False,
        backend="reference",
    ) as llm:
        yield llm


def resident(llm: LLM) -> int:
    """Bytes of the cache's mappings that are in memory, from the system's own list.

    The system may join neighbouring mappings, so there can be a little that is not the cache's.
    """
    layer = llm._loaded.runner.local.devices[0].arena.layer(0)
    addresses = [plane.data_ptr() for store in (layer.keys, layer.values) for plane in store.planes.values()]
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            is_ours = any(low <= address < high for address in addresses)
        elif is_ours and first == "Rss:":
            total += int(rest[0]) * 1024
    return total


def is_all_given_back(llm: LLM) -> bool:
    llm.memory()  # whatever was asked of the engine before has been done now
    return llm._loaded.runner.local.devices[0].arena.n_resident == 0 and resident(llm) < USED // 10


def test_memory_rises_with_a_request_and_falls_when_it_ends(llm: LLM) -> None:
    assert is_all_given_back(llm)
    with stepped_by_hand(llm) as step:
        stream = llm.stream(PROMPT, max_tokens=3, temperature=0, ignore_eos=True)
        step(2)  # the prompt is longer than one batch
        assert USED <= resident(llm) <= 1.2 * USED
    stream.finish()
    assert is_all_given_back(llm)
    assert llm.memory()["kv_cache"] == 8 * 2048 * TOKEN_BYTES  # what is reserved


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_draft_model_gives_the_memory_of_ended_requests_back(bundled: Path, is_cancelled: bool) -> None:
    if not can_page_on_demand():
        pytest.skip("this system cannot page on demand")
    options: dict[str, Any] = {"kv_cache_demand_paged": True, "prefix_cache": False}
    with LLM(bundled, draft_model=bundled_draft_path(), n_ctx=512, **options) as llm:
        (draft,) = llm._loaded.companions
        arena = draft.runner.local.devices[0].arena
        with stepped_by_hand(llm) as step:
            params = {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "speculative": "draft"}
            stream = llm.stream(list(range(3, 300)), **params)
            llm._loaded.engine.speculator._control = FixedControl()
            step(6)
            assert arena.n_resident > 0
            if is_cancelled:
                stream.close()
        stream.finish()
        llm.memory()  # the engine's thread has done all that was asked of it
        assert arena.n_resident == 0
        draft._cache.check_integrity()


def test_a_forgotten_text_leaves_the_caches_of_the_model_and_of_its_draft_model(bundled: Path) -> None:
    if not can_page_on_demand():
        pytest.skip("this system cannot page on demand")
    with LLM(bundled, draft_model=bundled_draft_path(), n_ctx=256, kv_cache_demand_paged=True) as llm:
        llm._loaded.engine.speculator._control = FixedControl()
        prompt = list(range(3, 100))
        found = llm.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True, speculative="draft")
        (draft,) = llm._loaded.companions
        arenas = [runner.local.devices[0].arena for runner in (llm._loaded.runner, draft.runner)]
        assert all(arena.n_resident for arena in arenas)
        llm.forget([*prompt, *found.tokens])
        assert not any(arena.n_resident for arena in arenas)
        draft._cache.check_integrity()


def test_a_cancelled_request_gives_its_memory_back_at_once(llm: LLM) -> None:
    with stepped_by_hand(llm) as step:
        stream = llm.stream(PROMPT, max_tokens=30, temperature=0, ignore_eos=True)
        step(3)
        assert resident(llm) >= USED
        stream.close()
        assert stream.completion.finish_reason == "cancelled"
    assert is_all_given_back(llm)
    llm.logits(PROMPT)
    assert is_all_given_back(llm)
