"""The convolution and the delta rule: native kernels against the plain recurrence, and their split rules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from motley.backends import get_backend
from motley.backends.cpu.native import HAS_RECURRENT
from motley.formats import FORMATS, PackedTensor
from motley.graph import F32, Graph, Tensor
from motley.graph.ops import CONVOLUTION, DELTA, CausalConv, DeltaNet, Input, StateInput, Weight, state_of
from motley.graph.ops.recurrent import n_key_heads
from motley.kvcache.state_arena import StateArena, StateBatch, StateLayout, StatePart, StateSpan
from motley.kvcache.store import allocate_zeroed
from motley.ownership import Split, Word
from motley.plan import DevicePlan
from motley.split.collectives import put, take

N_PENDING = 4
pytestmark = pytest.mark.skipif(not HAS_RECURRENT, reason="the native module is not built")


def convolution(n_tokens: int, n_channels: int, n_taps: int) -> Tensor:
    x = Input((n_tokens, n_channels), F32)(name="x")
    weight = Weight((n_channels, n_taps), "F32")(name="weight")
    return CausalConv()(x, weight, StateInput.of(0, CONVOLUTION, (n_taps - 1, n_channels)))


def delta(
    n_tokens: int, n_keys: int, n_heads: int, key_dim: int, value_dim: int, *, is_cyclic: bool
) -> Tensor:
    width = 2 * n_keys * key_dim + n_heads * value_dim
    mixed = Input((n_tokens, width), F32)(name="x")
    decay, beta = (Input((n_tokens, n_heads), F32)(name=name) for name in ("decay", "beta"))
    return DeltaNet(is_cyclic=is_cyclic)(
        mixed, decay, beta, StateInput.of(0, DELTA, (n_heads, key_dim, value_dim))
    )


def random_inputs(node: Tensor, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    named = {t.name: torch.randn(t.shape, generator=generator) for t in node.inputs[:-1]}
    if "decay" in named:
        named["decay"] = -named["decay"].abs()
        named["beta"] = named["beta"].sigmoid()
    return named


def arena_for(state: Tensor, kind: str = "f32") -> StateArena:
    part = StatePart(state.name, 0, state.shape, state_of(state).pending_shape)
    return StateArena(StateLayout(kind, (part,), 6, 4, N_PENDING), 0, allocate_zeroed, allocate_zeroed)


class Runner:
    """One node on one backend, with states of its own."""

    def __init__(
        self, node: Tensor, weights: dict[str, torch.Tensor], backend: str, kind: str = "f32"
    ) -> None:
        own = get_backend(backend)
        loaded = {
            t.name: own.load(PackedTensor.pack(weights[t.name], FORMATS["F32"]))
            for t in node.inputs
            if isinstance(t.op, Weight)
        }
        plan = DevicePlan.of(Graph.of(node), own.kernels)
        if backend != "reference":
            assert plan.steps[0].kernel.name == "native"
        self.state = node.inputs[-1].name
        self.arena = arena_for(node.inputs[-1], kind)
        self._executable = own.prepare(plan, loaded)

    def run(self, inputs: dict[str, torch.Tensor], spans: Sequence[StateSpan]) -> torch.Tensor:
        handle = self.arena.planes[self.state].on(StateBatch(tuple(spans)))
        return self._executable.run({**inputs, self.state: handle})[0].clone()


def random_batches(rng: random.Random, n_rows: int) -> list[list[StateSpan]]:
    """Batches of two sequences, with rows that stay pending and are rejected; slots and rings take turns."""
    at = [{"position": 0, "n_read": 0, "slot": -1, "ring": -1} for _ in range(2)]
    batches = []
    for _ in range(6):
        cut, spans, first = rng.randint(1, n_rows - 1), [], 0
        for i, (own, n) in enumerate(zip(at, (cut, n_rows - cut), strict=True)):
            n_pending = rng.randint(0, min(n - 1, N_PENDING))
            own["position"] = rng.randint(own["n_read"], own["position"])  # some pending rows are rejected
            is_in_place = own["slot"] >= 0 and rng.random() < 0.5
            target = own["slot"] if is_in_place else 3 * i + (own["slot"] + 1) % 3
            ring = own["ring"] if own["ring"] >= 0 and rng.random() < 0.5 else 2 * i + (own["ring"] + 1) % 2
            end = own["position"] + n
            spans.append(
                StateSpan(
                    first,
                    n,
                    own["position"],
                    own["slot"],
                    own["n_read"],
                    own["ring"],
                    target,
                    end - n_pending,
                    ring,
                )
            )
            own.update(position=end, n_read=end - n_pending, slot=target, ring=ring)
            first += n
        batches.append(spans)
    return batches


NODES = {
    "conv of 5 channels": convolution(9, 5, 2),
    "conv of 300 channels": convolution(9, 300, 4),
    "delta net": delta(9, 2, 4, 16, 16, is_cyclic=False),
    "delta net, cyclic, odd sizes": delta(9, 2, 6, 24, 40, is_cyclic=True),
    "delta net, heads of 128": delta(9, 1, 2, 128, 128, is_cyclic=False),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("name", NODES)
def test_kernels_give_what_the_recurrence_gives(name: str, kind: str, seed: int) -> None:
    node, rng = NODES[name], random.Random(seed)
    weights = random_inputs(node, seed)
    runners = [Runner(node, weights, backend, kind) for backend in ("reference", "cpu-exact")]
    tolerance = 1e-4 if kind == "f32" else 2e-2
    for number, spans in enumerate(random_batches(rng, node.shape[0])):
        inputs = random_inputs(node, 100 * seed + number)
        expected, found = (runner.run(inputs, spans) for runner in runners)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        for span in spans:
            states = [runner.arena.planes[runner.state].states[span.target].float() for runner in runners]
            torch.testing.assert_close(states[1], states[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NODES)
def test_pending_rows_are_as_good_as_folded_ones(name: str) -> None:
    """Any batches give what one batch gives."""
    node = NODES[name]
    inputs = random_inputs(node, 7)
    n_rows = node.shape[0]
    whole = Runner(node, inputs, "reference")
    expected = whole.run(inputs, [StateSpan(0, n_rows, 0, -1, 0, -1, 0, n_rows, -1)])
    parts = Runner(node, inputs, "reference")
    rows, n_read, slot, ring = [], 0, -1, -1
    for start, stop, folded in ((0, 3, 1), (3, 4, 4), (4, 9, 5)):
        shifted = {
            n: torch.cat([x[start:stop], x[:start], x[stop:]]) for n, x in inputs.items() if n != "weight"
        }
        span = StateSpan(0, stop - start, start, slot, n_read, ring, slot + 1, folded, ring + 1)
        rows.append(parts.run({**inputs, **shifted}, [span])[: stop - start])
        slot, ring, n_read = slot + 1, ring + 1, folded
    torch.testing.assert_close(torch.cat(rows), expected)


@pytest.mark.parametrize("word", [Word.run([1, 1]), Word.run([0, 2]), Word.run([1, 0, 1])])
@pytest.mark.parametrize("name", ["delta net", "delta net, cyclic, odd sizes"])
def test_devices_compute_their_heads_alone(name: str, word: Word) -> None:
    node = NODES[name]
    op: Any = node.op
    mixed, _, _, state = node.inputs
    times = state.shape[0] // n_key_heads(mixed.shape[1], state.shape)
    heads = word.power(times) if op.is_cyclic else word.stretch(times)
    (way,) = set(
        op.ways(
            node.inputs,
            (Split(0, Word.of(0, 9)), Split(0, Word.of(0, 9)), Split(0, Word.of(0, 9)), Split(0, heads)),
        )
    )
    inputs, spans = random_inputs(node, 3), random_batches(random.Random(3), 9)[0]
    whole = torch.empty(node.shape)
    for device in range(3):
        cut = {
            t.name: take(inputs[t.name], s.axis, s.word, device)
            for t, s in zip(node.inputs[:3], way.inputs[:3], strict=True)
            if isinstance(s, Split)
        }
        shape = (heads.count(device), *state.shape[1:])
        local = replace(state_of(state), size=shape)(name=state.name)
        handle = arena_for(local).planes[state.name].on(StateBatch(tuple(spans)))
        put(whole, op.reference([cut["x"], cut["decay"], cut["beta"], handle]), 1, heads, device)
    expected = Runner(node, inputs, "reference").run(inputs, spans)
    torch.testing.assert_close(whole, expected)


def test_words_that_separate_the_values_of_a_key_have_no_way() -> None:
    node = NODES["delta net"]
    whole = Split(0, Word.of(0, 9))
    assert not list(node.op.ways(node.inputs, (whole, whole, whole, Split(0, Word.run([1, 3])))))


def test_a_convolution_is_split_at_channels() -> None:
    node = NODES["conv of 5 channels"]
    word = Word.run([2, 3])
    ways = set(node.op.ways(node.inputs, (Split(1, word), Split(0, Word.of(0, 5)), Split(0, Word.of(0, 1)))))
    assert {way.output for way in ways if way.inputs[0] == Split(1, word)} == {Split(1, word)}
