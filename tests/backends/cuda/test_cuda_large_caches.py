"""Caches with more than 2³¹ numbers: no offset into them is computed with 32 bits (`launch_checks`).

Their memory is reserved, and only the pages that a kernel touches are taken.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from motley.backends.cuda.kernels import delta_net as delta_kernel
from motley.backends.cuda.kernels.attention import Shares, Tables, attend
from motley.backends.cuda.kernels.causal_conv import causal_conv
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.prefill import prefill, spans
from motley.backends.cuda.kernels.rope_and_store import RopeTable, rope_and_store
from motley.backends.cuda.kernels.rows import PLAIN, Rows
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.graph.ops import CausalConv, DeltaNet
from motley.kvcache.paging import PagedMemory
from motley.kvcache.state_arena import StateBatch, StatePlanes, StateSpan
from motley.kvcache.store import Store
from motley.kvcache.types import get_cache_type

pytestmark = [
    pytest.mark.slow,  # interpreted kernels: run them after a change of kernels
    pytest.mark.skipif(sys.platform != "linux", reason="reserves memory as Linux does"),
]

MANY = 2**31  # numbers of a plane
BLOCK, DIM = 16, 64
HEADS = slice(1, 2)  # of two rows


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("kind", "n_rows"), [("f32", 1), ("q8_0", 1), ("q4_0", 1), ("f16", 3), ("q8_0", 3)])
def test_the_last_blocks_of_a_large_cache_are_written_and_read(kind: str, n_rows: int) -> None:
    """`n_rows`: 1, a decode step; more, a prompt. Of equal keys, so that the result is the mean of the values."""
    n_blocks = MANY // (2 * DIM * BLOCK) + 2
    keys, values = (
        Store(
            get_cache_type(kind),
            n_blocks=n_blocks,
            block_size=BLOCK,
            n_rows=2,
            head_dim=DIM,
            allocate=PagedMemory().allocate,
        )
        for _ in range(2)
    )
    k_planes, v_planes = (CachePlanes.of(kind, store.planes) for store in (keys, values))
    q, k, v = normal(n_rows, 2, DIM, seed=1), torch.zeros(n_rows, 1, DIM), normal(n_rows, 1, DIM, seed=2)
    positions, last = torch.arange(n_rows, dtype=torch.int32), n_blocks - 1
    slots, rope = last * BLOCK + positions, RopeTable(torch.zeros(DIM // 2), DIM, True, 1.0)
    rotated = torch.empty_like(q)
    rope_and_store(
        q, k, v, positions, slots, rope, k_planes, v_planes, HEADS, rotated, rotate_k=False, rotate_v=False
    )
    if n_rows == 1:
        tables = Tables(int32(last)[None], int32(0), int32(0), int32(0))
        shares = Shares.empty(1, 2, 2, DIM, "cpu", min_blocks=1)
        attend(rotated, k_planes, v_planes, HEADS, tables, shares, scale=0.1)
        rows = Rows.empty(PLAIN, 1, 2 * DIM, "cpu")
        got = combine(shares, tables, BLOCK, rows, rotate=False).values.view(q.shape)
    else:
        got = torch.empty_like(q)
        of_rows = torch.from_numpy(spans(0, n_rows, 0, 0, 16))
        prefill(rotated, k_planes, v_planes, HEADS, int32(0, last), of_rows, got, span_rows=16, scale=0.1)
    means = torch.cumsum(v, 0) / torch.arange(1, n_rows + 1)[:, None, None]
    error = (got - means.expand_as(got)).abs().max()
    assert error < (0.3 if kind == "q4_0" else 0.03)


@pytest.mark.parametrize("n_rows", [1, 20])
def test_states_in_the_last_slots_are_read_and_written(n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step, and a prompt in chunks, of which the last three tokens stay pending."""
    monkeypatch.setattr(delta_kernel, "_COLUMNS", 16)
    heads, dim, channels, n_pending, taps = 2, 16, 96, 4, 4
    n_slots, ring = MANY // (heads * dim * dim) + 2, heads * (2 * dim + 2)
    n_rings, n_kept = MANY // (n_pending * ring) + 2, min(3, n_rows - 1)
    last, last_ring = n_slots - 1, n_rings - 1
    span = StateSpan(0, n_rows, 9, last, 8, last_ring, last - 1, 9 + n_rows - n_kept, last_ring)
    batch = StateBatch((span,))
    table = torch.from_numpy(np.asarray(batch.table)).int()
    mixed, op = normal(n_rows, channels, seed=1), DeltaNet()
    decay, beta = -normal(n_rows, heads, seed=2).abs(), normal(n_rows, heads, seed=3).sigmoid()
    found = []
    for is_reference in (True, False):
        memory = PagedMemory()
        states = memory.allocate((n_slots, heads, dim, dim), torch.float32)
        rings = memory.allocate((n_rings, n_pending, heads, 2 * dim + 2), torch.float32)
        states[last] = normal(heads, dim, dim, seed=4)
        rings[last_ring, 0] = normal(heads, 2 * dim + 2, seed=5) / 4
        own = StatePlanes(states, rings, 0, 0)
        if is_reference:
            out = op.reference([mixed, decay, beta, own.on(batch)])
        else:
            out = delta_kernel.delta_net(
                mixed, (decay, beta), states, rings, table, eps=op.eps, is_cyclic=False
            )
        found.append((out, states[last - 1].clone(), rings[last_ring].clone()))
    for expected, got in zip(*found, strict=True):
        assert (got - expected).abs().max() < 2e-3  # chunks are multiplied with tf32's 10 bits
    x, weight, windows = normal(n_rows, channels, seed=6), normal(channels, taps, seed=7), []
    for is_reference in (True, False):
        memory = PagedMemory()
        states = memory.allocate((MANY // (3 * channels) + 2, taps - 1, channels), torch.float32)
        rings = memory.allocate((MANY // (n_pending * channels) + 2, n_pending, channels), torch.float32)
        numbers = [
            0,
            n_rows,
            9,
            len(states) - 1,
            8,
            len(rings) - 1,
            len(states) - 2,
            span.n_written,
            len(rings) - 1,
        ]
        states[-1], rings[-1, 0] = normal(taps - 1, channels, seed=8), normal(channels, seed=9)
        own, batch = StatePlanes(states, rings, 0, 0), StateBatch((StateSpan(*numbers),))
        if is_reference:
            out = CausalConv().reference([x, weight, own.on(batch)])
        else:
            out = causal_conv(x, weight, states, rings, int32(*numbers)[None])
        windows.append((out, states[-2].clone(), rings[-1].clone()))
    for expected, got in zip(*windows, strict=True):
        torch.testing.assert_close(got, expected)
