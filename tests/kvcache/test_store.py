"""Stores and arenas: what is written is read back, in every type, at any slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from motley.errors import ConfigError, DeviceError
from motley.formats import FORMATS
from motley.kvcache.arena import Arena, GroupBatch, LayerGroup, SequenceTable
from motley.kvcache.sequences import BlockCopy
from motley.kvcache.store import Store
from motley.kvcache.types import CACHE_TYPES, get_cache_type

TOLERANCE = {
    "f32": 0,
    "f16": 1e-3,
    "bf16": 8e-3,
    "q8_0": 8e-3,
    "q5_1": 0.08,
    "q5_0": 0.09,
    "q4_1": 0.15,
    "q4_0": 0.2,
}


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def store(kind: str, **changes: int) -> Store:
    sizes = {"n_blocks": 6, "block_size": 16, "n_rows": 3, "head_dim": 64} | changes
    return Store(get_cache_type(kind), **sizes)


@pytest.mark.parametrize("kind", CACHE_TYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96])
def test_values_come_back_within_the_type_s_precision(kind: str, head_dim: int) -> None:
    s = store(kind, head_dim=head_dim)
    values = torch.randn(10, 2, head_dim)
    slots = torch.randperm(96)[:10]
    s.write(slice(1, 3), slots, values)
    error = relative_error(s.read(slice(1, 3), slots), values)
    assert error <= TOLERANCE.get(kind, 0.2)
    assert torch.equal(s.read(slice(0, 1), slots), torch.zeros(10, 1, head_dim)), "another head was touched"


@pytest.mark.parametrize("kind", sorted(set(CACHE_TYPES) - {"f32", "f16", "bf16"}))
def test_quantized_types_hold_what_the_gguf_format_holds(kind: str) -> None:
    """A store is another arrangement of the same planes: same values, same bytes per token."""
    values = torch.randn(5, 3, 64)
    s = store(kind)
    s.write(slice(0, 3), torch.arange(5), values)
    expected = FORMATS[kind.upper()].unpack(FORMATS[kind.upper()].pack(values))
    assert torch.equal(s.read(slice(0, 3), torch.arange(5)), expected)
    assert get_cache_type(kind).tile_bytes == FORMATS[kind.upper()].block_bytes


def test_layout_is_block_row_tile_token_width() -> None:
    s = store("q8_0")
    assert s.planes["codes"].shape == (6, 3, 2, 16, 32)
    assert s.planes["scale"].shape == (6, 3, 2, 16, 1)
    assert s.n_bytes == 6 * 3 * 2 * 16 * 34


def test_copying_a_block_copies_its_first_tokens_only() -> None:
    s = store("q4_0")
    values = torch.randn(32, 3, 64)
    s.write(slice(0, 3), torch.arange(32), values)
    before = s.read(slice(0, 3), torch.arange(32))
    s.copy_block(0, 1, 5)
    after = s.read(slice(0, 3), torch.arange(32))
    assert torch.equal(after[16:21], before[:5])
    assert torch.equal(after[21:], before[21:])


def test_arena_keeps_layers_and_their_uneven_heads_apart() -> None:
    f32 = get_cache_type("f32")
    groups = [LayerGroup((0, 2), (2, 0), 4), LayerGroup((1,), (1,), 2)]
    arena = Arena(f32, f32, groups, block_size=4, head_dim=32)
    batch = [GroupBatch.of([SequenceTable(0, 2, 0, 0, np.array([1], np.int32))], 4)] * 2
    arena.prepare(batch, [])
    written = {layer: torch.randn(2, heads, 32) for layer, heads in ((0, 2), (1, 1), (2, 0))}
    for layer, values in written.items():
        arena.layer(layer).on(batch[0]).write(values, -values)
    for layer, values in written.items():
        (sequence,) = arena.layer(layer).on(batch[0]).sequences()
        keys, stored = sequence.read()
        assert torch.equal(keys, values)
        assert torch.equal(stored, -values)
    moved = GroupBatch.of([SequenceTable(0, 2, 0, 0, np.array([0], np.int32))], 4)
    arena.prepare([moved, batch[1]], [BlockCopy(0, 1, 0, 2)])
    (sequence,) = arena.layer(0).on(moved).sequences()
    assert torch.equal(sequence.read()[0], written[0])
    assert arena.n_bytes == 2 * 4 * (4 * 2 + 2 * 1) * 4 * 32


def test_random_contexts_fill_every_head_of_every_layer_at_the_batchs_slots_only() -> None:
    q8_0, f16 = get_cache_type("q8_0"), get_cache_type("f16")
    groups = [LayerGroup((0, 2, 3), (1, 2, 0), 4), LayerGroup((1,), (1,), 2)]
    arena = Arena(q8_0, f16, groups, block_size=4, head_dim=32)
    slots, all_slots = torch.tensor([5, 6]), torch.arange(8)
    arena.store_random([GroupBatch(slots, ())] * 2)
    for layer in range(4):
        for planes in arena.gather(layer, all_slots):
            n_filled = planes.get("codes", planes.get("values")).ne(0).any(-1).sum((1, 2))  # (tokens,)
            n_heads = (1, 1, 2, 0)[layer]
            assert n_filled.tolist() == [0, 0, 0, 0, 0, n_heads, n_heads, 0]


def test_unknown_type_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"q3_0.*f16.*iq4_nl"):
        get_cache_type("q3_0")


def test_memory_that_is_not_there_is_an_error_with_its_size() -> None:
    with pytest.raises(DeviceError, match=r"cpu has no memory for 4194304\.0 TiB of KV cache"):
        Store(get_cache_type("f16"), n_blocks=2**51, block_size=16, n_rows=2, head_dim=32)
