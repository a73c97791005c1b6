"""Several rows of a sequence on a real GPU: bundles, trees, and long contexts of prompts, against float32."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from motley import LLM, SamplingParams
from motley.backends.cuda import library_attention
from motley.backends.cuda.kernels.attention import Shares, Tables, attend
from motley.backends.cuda.kernels.bundles import attend_bundles, supports, tuning_of
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.prefill import max_span_rows, prefill, spans
from motley.backends.cuda.kernels.rows import PLAIN, Rows
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.backends.cuda.staging import Chunk
from motley.engine.trees import row_masks
from motley.graph.ops import Hadamard
from motley.kvcache.store import Store
from motley.kvcache.types import get_cache_type

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from by_hand import stepped_by_hand
from drafters import give, right, right_last, serve

Load = Callable[..., LLM]
BLOCK, KV_HEADS, GROUP, DIM = 32, 2, 4, 128
HEADS = slice(0, KV_HEADS)


def filled(kind: str, n_tokens: int) -> tuple[CachePlanes, torch.Tensor, torch.Tensor]:
    """Random values of a sequence in a cache, its blocks in a random order, and the values (heads, tokens, dim)."""
    n_blocks = -(-n_tokens // BLOCK)
    store = Store(get_cache_type(kind), n_blocks=n_blocks, block_size=BLOCK, n_rows=KV_HEADS, head_dim=DIM)
    blocks = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(1))
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:n_tokens]
    store.write(HEADS, slots, torch.randn(n_tokens, KV_HEADS, DIM))
    values = store.read(HEADS, slots).to("cuda").transpose(0, 1)
    planes = {name: plane.to("cuda") for name, plane in store.planes.items()}
    return CachePlanes.of(kind, planes), blocks.int().to("cuda"), values


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    scores = q.view(len(q), KV_HEADS, GROUP, DIM) @ k.mT * scale
    weights = torch.softmax(scores.masked_fill(~seen[:, None, None], -torch.inf), -1)
    return (weights @ v).reshape(q.shape)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("n_rows", [3, 8, 16, 40])
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_rows_of_trees(kind: str, n_rows: int, window: int | None) -> None:
    torch.manual_seed(n_rows)
    rng, before = random.Random(n_rows), 3333
    parents = [rng.choice((i - 1, i - 1, rng.randrange(-1, i))) for i in range(n_rows - 1)]
    masks = row_masks(parents)
    (keys, blocks, k), (values, _, v) = (filled(kind, before + n_rows) for _ in "kv")
    q = torch.randn(n_rows, KV_HEADS * GROUP, DIM, device="cuda")
    seen = torch.zeros(n_rows, before + n_rows, dtype=torch.bool)
    for i, mask in enumerate(masks):
        seen[i, max(0, before + mask.bit_count() - (window or 10**9)) : before] = True
        seen[i, before:] = torch.tensor([bool(mask >> j & 1) for j in range(n_rows)])
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    of_rows = torch.from_numpy(np.array(masks, np.uint64).view(np.int32).reshape(-1, 2)).to("cuda")
    tables = Tables(blocks[None], zero, zero, zero + before, n_rows, zero, zero + n_rows, of_rows)
    planes = keys, values
    n_splits = tuning_of(n_rows * GROUP, kind, kind).n_splits(1, n_rows * GROUP, KV_HEADS)
    for kernel in (attend, attend_bundles):
        if kernel is attend_bundles and not supports(kind, kind, DIM, BLOCK):
            continue
        shares = Shares.empty(n_rows, KV_HEADS * GROUP, n_splits, DIM, "cuda", 2)
        for part in (shares.values, shares.peaks, shares.sums):
            part.fill_(torch.nan)
        kernel(q, *planes, HEADS, tables, shares, scale=0.1, window=window)
        rows = Rows.empty(PLAIN, n_rows, q[0].numel(), "cuda")
        out = combine(shares, tables, BLOCK, rows, rotate=False, window=window).values.view(q.shape)
        assert relative_error(out, expected(q, k, v, seen.to("cuda"), 0.1)) < 2e-3


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize(("n_rows", "before"), [(512, 4096), (700, 6200), (2048, 6144)])
def test_long_contexts_in_pieces(kind: str, n_rows: int, before: int) -> None:
    torch.manual_seed(n_rows)
    (keys, blocks, k), (values, _, v) = (filled(kind, before + n_rows) for _ in "kv")
    planes = keys, values
    if not library_attention.supports(torch.device("cuda", 0), *planes, DIM):
        pytest.skip("cuDNN is not used on this GPU")
    q, n_taken = torch.randn(n_rows, KV_HEADS * GROUP, DIM, device="cuda"), before // 2048 * 2048
    numbers = torch.cat([torch.zeros(1, dtype=torch.int32, device="cuda"), blocks])
    size, is_rotated = max_span_rows(kind, kind, DIM), kind != "f16"
    portions = torch.from_numpy(np.ascontiguousarray(spans(0, n_rows, before, 0, size))).to("cuda")
    out, sums = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device="cuda")
    if not (with_own := library_attention.takes_own(Chunk(0, n_rows, before, 0, 0, len(portions)))):
        sums = prefill(
            q, *planes, HEADS, numbers, portions, out,
            span_rows=size, scale=0.1, rotate=is_rotated, n_skipped=n_taken,
        )  # fmt: skip
    assert with_own == (n_rows == 2048)
    library_attention.attend_pieces(
        q, *planes, HEADS, numbers[1:], n_taken, out, sums,
        scale=0.1, rotation=DIM if is_rotated else 1, with_own=with_own,
    )  # fmt: skip
    last = before + torch.arange(n_rows, device="cuda")
    wanted = expected(q, k, v, torch.arange(before + n_rows, device="cuda") <= last[:, None], 0.1)
    if is_rotated:
        wanted = wanted @ Hadamard(DIM).reference([]).to("cuda")
    assert relative_error(out, wanted) < 2e-3


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_texts_with_trees(load: Load, kind: str) -> None:
    """Greedy answers with wrong branches before the right one; graphs are captured and replayed."""
    llm = load(cache_type_k=kind, cache_type_v=kind)
    prompts = [llm.tokenizer.encode("Once upon a time there was a little dog."), [5, 9, 30]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (40, 24)]
    with stepped_by_hand(llm):
        engine = llm._loaded.engine
        assert engine.runner.refuses_trees is None
        give(llm, right)
        without = [tuple(request.generated) for request in serve(engine, prompts, params)]
        drafter = give(llm, right_last)
        drafter.answers |= dict(zip(map(tuple, prompts), without, strict=True))
        found = [tuple(request.generated) for request in serve(engine, prompts, params)]
    assert max(drafter.n_accepted) == 7
    # Sums of bundles are rounded differently: where two logits are nearly equal, a text may go on differently.
    assert sum(_n_alike(x, y) for x, y in zip(found, without, strict=True)) >= 24


def _n_alike(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
