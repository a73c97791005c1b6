"""The unused part of the paged KV cache, and the saving by a shared prefix.

    python -m benchmarks kv_waste [--json]

Two savings that do not depend on the cache's type, measured on the block manager itself:
- 200 sequences of random lengths (100 … 2,000 tokens, as in a mixed load of chats): slots without a token.
- 100 requests that begin with the same 1,000 tokens: blocks in use, compared with one prefix plus 100 tails.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from typing import TypedDict

from motley.kvcache.blocks import n_blocks_for
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import GroupSpec

BLOCK_SIZES = (16, 32, 64)
LONGEST, PREFIX = 2000, 1000


class Waste(TypedDict):
    block_size: int
    n_sequences: int
    n_tokens: int
    n_blocks: int
    waste_percent: float
    contiguous_waste_percent: float  # if each sequence reserved LONGEST slots


class Sharing(TypedDict):
    block_size: int
    n_requests: int
    prefix_tokens: int
    tail_tokens: int  # of all requests
    n_blocks: int  # in use
    n_blocks_of_one_prefix_and_tails: int
    n_blocks_without_sharing: int


def feed(cache: CacheManager, tokens: Sequence[int]) -> int:
    """A new sequence with these tokens, marked as computed."""
    opened = cache.open(tokens)
    assert cache.reserve(opened.seq, len(tokens) - opened.n_cached) is not None, (
        "the benchmark's pool is too small"
    )
    cache.commit(opened.seq, tokens[opened.n_cached :])
    return opened.seq


def measure_waste(block_size: int, n_sequences: int, rng: random.Random) -> Waste:
    lengths = [rng.randint(100, LONGEST) for _ in range(n_sequences)]
    pool = GroupSpec("full", sum(n_blocks_for(n, block_size) for n in lengths))
    cache = CacheManager([pool], block_size)
    for n in lengths:
        feed(cache, [rng.randrange(32000) for _ in range(n)])
    cache.check_integrity()
    (group,) = cache.stats().groups
    return Waste(
        block_size=block_size,
        n_sequences=n_sequences,
        n_tokens=sum(lengths),
        n_blocks=group.n_used,
        waste_percent=group.waste_percent,
        contiguous_waste_percent=100 * (1 - sum(lengths) / (LONGEST * n_sequences)),
    )


def measure_sharing(block_size: int, n_requests: int, rng: random.Random) -> Sharing:
    prefix = [rng.randrange(32000) for _ in range(PREFIX)]
    tails = [[rng.randrange(32000) for _ in range(rng.randint(20, 200))] for _ in range(n_requests)]
    alone = sum(n_blocks_for(PREFIX + len(tail), block_size) for tail in tails)
    cache = CacheManager([GroupSpec("full", alone)], block_size)
    for tail in tails:
        feed(cache, prefix + tail)
    cache.check_integrity()
    (group,) = cache.stats().groups
    n_shared, n_copied = divmod(PREFIX, block_size)  # a partly filled block is not shared
    return Sharing(
        block_size=block_size,
        n_requests=n_requests,
        prefix_tokens=PREFIX,
        tail_tokens=sum(map(len, tails)),
        n_blocks=group.n_used,
        n_blocks_of_one_prefix_and_tails=n_shared
        + sum(n_blocks_for(n_copied + len(tail), block_size) for tail in tails),
        n_blocks_without_sharing=alone,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    rng = random.Random(chosen.seed)
    waste = [measure_waste(size, 200, rng) for size in BLOCK_SIZES]
    sharing = [measure_sharing(size, 100, rng) for size in BLOCK_SIZES]
    if chosen.json:
        print(json.dumps({"waste": waste, "sharing": sharing}))
        return
    print("200 sequences of 100 … 2,000 tokens")
    print("block   tokens   blocks   waste   (2,000 slots for each: waste)")
    for w in waste:
        figures = f"{w['n_tokens']:>9}{w['n_blocks']:>9}{w['waste_percent']:>7.2f} %"
        print(f"{w['block_size']:>5}{figures}{w['contiguous_waste_percent']:>23.2f} %")
    print("\n100 requests with the same first 1,000 tokens")
    print("block   blocks in use   one prefix + tails   without sharing")
    for s in sharing:
        expected, alone = s["n_blocks_of_one_prefix_and_tails"], s["n_blocks_without_sharing"]
        print(f"{s['block_size']:>5}{s['n_blocks']:>16}{expected:>21}{alone:>18}")


if __name__ == "__main__":
    main()
