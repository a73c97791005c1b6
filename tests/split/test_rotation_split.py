"""The attention rotation, reshape → one matmul → reshape, follows the heads: no device talks to another inside it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from split_runner import check_split, run_whole
from split_values import CacheValue, source, spell

from motley.formats import FORMATS, PackedTensor
from motley.graph import Graph, Tensor
from motley.graph.ops import Attention, CacheStore, Hadamard, MatMul, Reshape
from motley.graph.tensor import draw
from motley.ownership import Split, Word, sole_owner

TOKENS, KV_HEADS, GROUP, DIM, EMBD = 3, 6, 2, 8, 5
N_DEVICES = 7

# Who has which of six heads: uneven crews, devices without any, letters in turn.
WORDS = {
    "even": [0, 0, 0, 1, 1, 1],
    "uneven": [0, 0, 0, 0, 1, 2],
    "zero shares": [1, 1, 1, 3, 3, 6],
    "interleaved": [0, 1, 0, 1, 0, 1],
    "interleaved, uneven": [2, 0, 0, 2, 0, 0],
    "without order": [3, 0, 2, 2, 0, 1],
    "all devices but one": [6, 1, 2, 3, 4, 5],
}
words = pytest.mark.parametrize("word", [pytest.param(spell(w), id=name) for name, w in WORDS.items()])
sizes = pytest.mark.parametrize("n", [DIM, DIM // 2, 2])


def rotated(x: Tensor, n: int) -> Tensor:
    """x (tokens, heads, dim), its last axis turned in pieces of n; 0: not at all."""
    if not n:
        return x
    rows = Reshape((x.n_values // n, n))(x)
    return Reshape(x.shape)(MatMul()(rows, Hadamard(n)()))


@words
@sizes
@pytest.mark.parametrize("n_tokens", [1, TOKENS])
def test_a_rotation_of_heads_needs_no_collective(word: Word, n: int, n_tokens: int) -> None:
    x = draw(random.Random(0), n_tokens, len(word), DIM)
    turned = rotated(source(x, "x"), n)
    split = check_split(Graph.of(turned), {"x": x}, N_DEVICES, {"x": Split(1, word)})
    assert [t.tensor for t in split.collectives] == [turned]  # for this test, which wants the result whole
    inside = [split.state(t) for t in split.graph.nodes if t.shape == (x.numel() // n, n)]
    assert inside == [Split(0, word.stretch(DIM // n).power(n_tokens))] * 2
    assert split.state(turned) == Split(1, word)


@sizes
def test_a_rotation_stays_on_the_one_device_that_has_all_heads(n: int) -> None:
    x = draw(random.Random(0), TOKENS, 4, DIM)
    turned = rotated(source(x, "x"), n)
    split = check_split(Graph.of(turned), {"x": x}, 3, {"x": Split(1, Word.of(1, 4))})
    assert [t.kind for t in split.collectives] == ["broadcast"]
    assert {sole_owner(split.state(t)) for t in split.graph.nodes if t.inputs} == {1}


def attention(values: dict[str, Any], n: int) -> Graph:
    """Projections, a rotation of q, k and v, attention over the cache, the rotation back, the output matrix."""
    nodes = {name: source(value, name) for name, value in values.items()}
    q, k, v = (MatMul()(nodes["x"], nodes[name]) for name in ("wq", "wk", "wv"))
    q = rotated(Reshape((TOKENS, KV_HEADS * GROUP, DIM))(q), n)
    k, v = (rotated(Reshape((TOKENS, KV_HEADS, DIM))(t), n) for t in (k, v))
    attended = rotated(Attention(DIM**-0.5)(q, CacheStore()(nodes["cache.0"], k, v)), n)
    return Graph.of(MatMul()(Reshape((TOKENS, KV_HEADS * GROUP * DIM))(attended), nodes["wo"]))


def attention_values() -> dict[str, Any]:
    """All of the sequence is in this batch: the cache is empty, so it holds nothing that was not rotated."""
    rng = random.Random(1)
    shapes = {
        "wq": (KV_HEADS * GROUP * DIM, EMBD),
        "wk": (KV_HEADS * DIM, EMBD),
        "wv": (KV_HEADS * DIM, EMBD),
        "wo": (EMBD, KV_HEADS * GROUP * DIM),
    }
    weights = {name: PackedTensor.pack(draw(rng, *shape), FORMATS["F32"]) for name, shape in shapes.items()}
    cache = CacheValue.random(rng, TOKENS, KV_HEADS, DIM, max_before=0)
    return {"x": draw(rng, TOKENS, EMBD), "cache.0": cache, **weights}


@words
@sizes
def test_attention_with_rotations_needs_the_one_sum_that_it_needs_without(word: Word, n: int) -> None:
    values = attention_values()
    graph = attention(values, n)
    kv, q = word.stretch(DIM), word.stretch(GROUP * DIM)
    placement = {"wq": Split(0, q), "wk": Split(0, kv), "wv": Split(0, kv), "wo": Split(1, q)}
    split = check_split(graph, values, N_DEVICES, placement)
    assert [(t.kind, t.tensor) for t in split.collectives] == [("all_reduce", graph.outputs[0])]
    assert len([t for t in split.graph.nodes if isinstance(t.op, Hadamard)]) == 4


@sizes
def test_rotating_back_gives_what_attention_gives_without_rotation(n: int) -> None:
    values = attention_values()
    (expected,), _ = run_whole(attention(values, 0), values)
    (actual,), _ = run_whole(attention(values, n), values)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
