"""Sliding-window layers: blocks are dropped behind the window, and nobody can tell from the outputs.

`random_gemma3`: five layers of six see 32 tokens; the blocks here are much smaller than that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_driver import CacheDriver

from motley.kvcache.blocks import HOLE
from motley.kvcache.manager import CacheManager

WINDOW = 32
N_CTX = 256


@pytest.fixture(scope="module")
def path(random_gemma3: Path) -> Path:
    return random_gemma3


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    ids: list[int] = np.random.default_rng(1).integers(1, 250, 160).tolist()
    return ids


@pytest.fixture(scope="module")
def full_cache_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """Of a cache that never drops a block: what windows hide is only masked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheManager, "advance", lambda *_: None)
        with driver(path, n_batch=N_CTX) as d:
            return d.logits(tokens, [len(tokens)])


@contextmanager
def driver(path: Path, **options: object) -> Iterator[CacheDriver]:
    d = CacheDriver(path, **({"n_ctx": N_CTX, "n_batch": 32, "kv_block_size": 8} | options))
    try:
        yield d
    finally:
        d.close()


def n_window_blocks(d: CacheDriver, n_batch: int) -> int:
    """The most that one sequence may hold: the window before the batch's first token, and the batch."""
    group = d.cache.groups[1]
    assert group.spec.window == WINDOW
    return group.n_needed(N_CTX, n_batch)


@pytest.mark.parametrize("n_batch", [1, 5, 37, 160])
def test_every_position_s_output_is_that_of_a_full_cache(
    path: Path, tokens: list[int], full_cache_logits: torch.Tensor, n_batch: int
) -> None:
    with driver(path, n_batch=n_batch) as d:
        logits = d.logits(tokens, repeat(n_batch))
    torch.testing.assert_close(logits, full_cache_logits, atol=2e-4, rtol=0)


def test_blocks_are_dropped_behind_the_window_of_the_batch_s_first_token(
    path: Path, tokens: list[int]
) -> None:
    with driver(path) as d:
        sequence, _ = d.open()
        d.feed(sequence, tokens[:32])
        d.feed(sequence, tokens[32:64])
        d.feed(sequence, tokens[64:96])
        full, windowed = (d.cache.tables([sequence], group)[0].blocks for group in (0, 1))
        assert HOLE not in full
        # Position 64 sees 33 … 64, and block 4 begins at 32; position 95 would have needed only 64 and on.
        assert [block == HOLE for block in windowed] == [True] * 4 + [False] * 8


def test_a_long_run_of_drafts_has_bounded_memory_and_the_right_outputs(
    path: Path, tokens: list[int], full_cache_logits: torch.Tensor
) -> None:
    """Speculation: six tokens go in, some are rejected, the next batch begins where the accepted ones end."""
    rng, n_drafts = random.Random(3), 6
    with driver(path, n_batch=n_drafts) as d:
        bound = n_window_blocks(d, n_drafts)
        assert bound == 6  # 37 tokens at the worst alignment to blocks of 8
        sequence, _ = d.open()
        done, most = 0, 0
        while done < len(tokens) - n_drafts:
            n_accepted = rng.randint(1, n_drafts)
            rejected = [(t + 1) % 300 for t in tokens[done + n_accepted : done + n_drafts]]
            drafts = [*tokens[done : done + n_accepted], *rejected]
            logits = d.feed(sequence, drafts, n_accepted)[:n_accepted]
            expected = full_cache_logits[done : done + n_accepted]
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
            done += n_accepted
            most = max(most, d.n_used()[1])
        assert most == bound
        assert d.n_used()[0] >= done // 8


def test_window_groups_take_memory_for_windows_not_for_contexts(path: Path) -> None:
    with driver(path, n_ctx=2048) as d:
        full, windowed = (group.pool.n_blocks for group in d.cache.groups)
        assert full == 2 * 2048 // 8
        assert windowed == 2 * ((WINDOW + 32) // 8 + 1)


def test_a_prefix_is_found_though_its_early_window_blocks_are_gone(
    path: Path, tokens: list[int], full_cache_logits: torch.Tensor
) -> None:
    with driver(path, kv_cache_tokens=512) as d:
        sequence, _ = d.open()
        for start in range(0, 128, 32):
            d.feed(sequence, tokens[start : start + 32])
        d.cache.free(sequence)
        sequence, n_found = d.open(tokens)
        assert n_found == 128
        assert HOLE in d.cache.tables([sequence], 1)[0].blocks
        logits = d.feed(sequence, tokens[128:])
        torch.testing.assert_close(logits, full_cache_logits[128:], atol=2e-4, rtol=0)


def test_a_prefix_that_ends_inside_evicted_window_blocks_is_computed_again(
    path: Path, tokens: list[int], full_cache_logits: torch.Tensor
) -> None:
    """The long prompt's window blocks push out those that a shorter prompt would need."""
    with driver(path, kv_cache_tokens=512, n_parallel=1) as d:
        sequence, _ = d.open()
        for start in range(0, 160, 32):
            d.feed(sequence, tokens[start : start + 32])
        d.cache.free(sequence)
        sequence, n_found = d.open(tokens[:72])
        assert n_found < 64
        logits = d.feed(sequence, tokens[n_found:72])
        torch.testing.assert_close(logits, full_cache_logits[n_found:72], atol=2e-4, rtol=0)


def test_requests_that_share_a_prefix_answer_as_alone(path: Path, tokens: list[int]) -> None:
    prompts = [tokens[:96] + tokens[100 + i : 104 + i] for i in range(4)]
    with driver(path, prefix_cache=False) as d:
        alone = [d.llm.generate(p, max_tokens=12, temperature=0).tokens for p in prompts]
    with driver(path, n_parallel=4) as d:
        first = d.llm.generate(prompts[0], max_tokens=12, temperature=0)
        together = d.llm.generate(prompts, max_tokens=12, temperature=0)
        assert [c.tokens for c in together] == alone == [first.tokens, *alone[1:]]
        assert min(c.timings.cached_tokens for c in together) >= 64
        d.cache.check_integrity()
