"""A demand-paged cache as `LLM` runs it: what the system counts as resident follows use up and down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.by_hand import stepped_by_hand

from motley import LLM
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
