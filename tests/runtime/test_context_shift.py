"""Keys that move to other positions: exactly what storing them there would have given, within the type's precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_driver import CacheDriver

from motley.kvcache.types import CACHE_TYPES

N, N_KEEP, N_DROP = 96, 5, 37  # no multiples of a block
CREW = {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)}
# Relative error of keys: one quantization of what was quantized before.
TOLERANCE = {"f32": 1e-5, "f16": 1e-3, "bf16": 8e-3, "q8_0": 0.01, "q5_1": 0.08, "q5_0": 0.09, "q4_1": 0.15}


@pytest.fixture(params=["random_llama", "random_gemma3", "llama", "phi3", "qwen2"])
def path(request: pytest.FixtureRequest) -> Path:
    """Made on the spot: with one rope, and with two and windows. Goldens: llama3's and longrope's divisors, biases."""
    name: str = request.param
    found: Path = request.getfixturevalue(name if name.startswith("random") else "shared")
    return found if name.startswith("random") else found / "golden" / name / "model.gguf"


@contextmanager
def driver(path: Path, **options: Any) -> Iterator[CacheDriver]:
    d = CacheDriver(path, **({"n_ctx": 128, "kv_block_size": 8} | options))
    try:
        yield d
    finally:
        d.close()


TOKENS: list[int] = np.random.default_rng(1).integers(1, 250, N).tolist()


def stored(d: CacheDriver, sequence: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (tokens, heads, dim) of a layer as they are stored, over all devices."""
    parts = []
    for arena in d.runner.local.arenas:
        own = arena.layer(layer)
        view = d.cache.tables([sequence], own.group)[0]
        size = d.cache.block_size
        slots = torch.tensor([view.blocks[t // size] * size + t % size for t in range(view.n_tokens)])
        parts.append([store.read(own.rows, slots) for store in (own.keys, own.values)])
    keys, values = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return keys, values


def shift(d: CacheDriver, sequence: int) -> None:
    shifts = d.cache.shift(sequence, N_KEEP, N_DROP)
    assert shifts is not None
    d.runner.shift(shifts)
    d.cache.check_integrity()


def expected_keys(d: CacheDriver, layer: int, before: torch.Tensor, sequence_tokens: int) -> torch.Tensor:
    kept = torch.arange(N_KEEP + N_DROP, sequence_tokens)
    turned = d.runner.local.devices[0].key_rotator(layer, before[kept], -N_DROP)
    return torch.cat([before[:N_KEEP], turned])


@pytest.mark.parametrize("options", [{}, CREW], ids=["alone", "crew"])
def test_shifted_keys_are_those_of_a_first_layer_at_the_new_positions(
    path: Path, options: dict[str, Any]
) -> None:
    """The first layer's keys depend on token and position only: there is a truth to compare with."""
    tokens = TOKENS
    left = tokens[:N_KEEP] + tokens[N_KEEP + N_DROP :]
    with driver(path, **options) as d:
        sequence, _ = d.open()
        d.feed(sequence, tokens)
        shift(d, sequence)
        fresh, _ = d.open()
        d.feed(fresh, left)
        n_unseen = 0 if len(d.cache.groups) == 1 else len(left) - 32 + 1  # layer 0 of gemma3 has a window
        for moved, computed in zip(stored(d, sequence, 0), stored(d, fresh, 0), strict=True):
            torch.testing.assert_close(moved[n_unseen:], computed[n_unseen:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_every_type_keeps_its_precision_rotated_or_not(random_llama: Path, kind: str) -> None:
    tokens = TOKENS
    for rotation in (True, False):
        with driver(random_llama, cache_type_k=kind, cache_type_v=kind, kv_rotation=rotation) as d:
            sequence, _ = d.open()
            d.feed(sequence, tokens)
            before = [stored(d, sequence, layer) for layer in range(4)]
            shift(d, sequence)
            for layer, (keys, values) in enumerate(before):
                moved_keys, moved_values = stored(d, sequence, layer)
                wanted = expected_keys(d, layer, keys, N)
                error = ((moved_keys - wanted).norm() / wanted.norm()).item()
                assert error <= TOLERANCE.get(kind, 0.2), (layer, rotation)
                assert torch.equal(moved_keys[:N_KEEP], keys[:N_KEEP])
                assert torch.equal(moved_values, torch.cat([values[:N_KEEP], values[N_KEEP + N_DROP :]]))


@pytest.mark.parametrize("options", [{}, CREW], ids=["alone", "crew"])
def test_what_follows_a_shift_is_computed_from_the_moved_keys(
    random_llama: Path, options: dict[str, Any]
) -> None:
    """Against attention done by hand: forward the next token with the keys of unshifted positions, re-roped."""
    tokens = TOKENS
    with driver(random_llama) as d:
        sequence, _ = d.open()
        d.feed(sequence, tokens)
        before = [stored(d, sequence, layer) for layer in range(4)]
        wanted = [(expected_keys(d, i, k, N), torch.cat([v[:5], v[42:]])) for i, (k, v) in enumerate(before)]
        other, _ = d.open()
        d.feed(other, tokens[: N - N_DROP])
        arena = d.runner.local.arenas[0]
        view = d.cache.tables([other])[0]
        slots = torch.tensor([view.blocks[t // 8] * 8 + t % 8 for t in range(view.n_tokens)])
        for layer, (keys, values) in enumerate(wanted):
            own = arena.layer(layer)
            own.keys.write(own.rows, slots, keys)
            own.values.write(own.rows, slots, values)
        expected = d.feed(other, [7, 8, 9])
    with driver(random_llama, **options) as d:
        sequence, _ = d.open()
        d.feed(sequence, tokens)
        shift(d, sequence)
        torch.testing.assert_close(d.feed(sequence, [7, 8, 9]), expected, atol=1e-3, rtol=0)


def test_a_fork_and_the_prefix_cache_keep_what_they_had(random_llama: Path) -> None:
    tokens = TOKENS
    with driver(random_llama, kv_cache_tokens=512) as d:
        sequence, _ = d.open()
        d.feed(sequence, tokens)
        fork = d.cache.fork(sequence)
        before = stored(d, fork, 3)
        shift(d, sequence)
        assert all(torch.equal(a, b) for a, b in zip(stored(d, fork, 3), before, strict=True))
        d.cache.free(fork)
        d.cache.free(sequence)
        found, n_found = d.open([*tokens, 3])
        assert n_found == N
        assert all(torch.equal(a, b) for a, b in zip(stored(d, found, 3), before, strict=True))


def test_shifted_blocks_are_never_found(random_llama: Path) -> None:
    tokens = TOKENS
    left = tokens[:N_KEEP] + tokens[N_KEEP + N_DROP :]
    with driver(random_llama) as d:
        sequence, _ = d.open()
        d.feed(sequence, tokens)
        shift(d, sequence)
        d.feed(sequence, [7] * 20)
        d.cache.free(sequence)
        assert d.open([*left, *[7] * 20])[1] <= N_KEEP
