"""Is a way to compute an op on parts sound? Cut random inputs as it says, run it on each device, join, compare."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from split_values import CacheValue, contents, joined, parts, source, spell

from motley.formats import PackedTensor
from motley.graph import CACHE, I32, Op, Sample, Tensor, Way
from motley.graph.graph import in_order
from motley.kvcache.arena import BatchLayer
from motley.ownership import MIRRORED, PARTIAL, Split, State, Word, sole_owner
from motley.split.infer import sole

MAX_COMBINATIONS = 600  # of states of all inputs, that are tried for an op


def check_rule(sample: Sample, n_devices: int, rng: random.Random) -> None:
    """Check every way that the op yields for inputs in any states, and those that every op has."""
    inputs = [source(value, f"x{i}") for i, value in enumerate(sample.inputs)]
    ways = set(_general_ways(sample.op, inputs, n_devices))
    for states in _combinations([_states(value, n_devices, rng) for value in sample.inputs], rng):
        ways.update(sample.op.ways(inputs, states))
    for way in sorted(ways, key=str):
        check_way(sample, way, n_devices, rng)


def _combinations(states: Sequence[list[State]], rng: random.Random) -> Iterator[tuple[State, ...]]:
    """All of them; of too many, each state of each input beside whole ones, and some at random.

    Only ops with many inputs have too many: ExpertFfn, whose six to nine inputs have some ten states each. All its ways
    follow from the state of one input (see its `ways`), so that each of them is found beside whole inputs; those at
    random would find a way that depends on several.
    """
    if prod(map(len, states)) <= MAX_COMBINATIONS:
        yield from product(*states)
        return
    for i, own in enumerate(states):
        for state in own:
            yield tuple(state if i == j else MIRRORED for j in range(len(states)))
    for _ in range(MAX_COMBINATIONS):
        yield tuple(rng.choice(own) for own in states)


def check_way(sample: Sample, way: Way, n_devices: int, rng: random.Random) -> None:
    inputs = [source(value, f"x{i}") for i, value in enumerate(sample.inputs)]
    node = sample.op(*inputs)
    for tensor, state in zip((*inputs, node), (*way.inputs, way.output), strict=True):
        assert _is_legal(state, tensor, n_devices), (
            f"{way}: {tensor!r} cannot be {state} on {n_devices} devices"
        )
    expected = _readable(_evaluate(node, dict(zip(inputs, sample.inputs, strict=True))))
    cut = [
        parts(value, state, n_devices, rng) for value, state in zip(sample.inputs, way.inputs, strict=True)
    ]
    results = [
        _run_part(sample.op, node, way, device, [value[device] for value in cut])
        if sole_owner(way.output) in (None, device)  # a device does nothing for what another has alone
        else expected.new_empty(way.output.local_shape(expected.shape, device))
        for device in range(n_devices)
    ]
    whole = joined(results, way.output, expected.shape)
    _assert_close(whole, expected, sample.op.tolerance, f"{sample.op}: {way}")


def words(length: int, n_devices: int, rng: random.Random, unit: int = 1) -> list[Word]:
    """Ways to write an axis down: a run with zero counts, interleaved, letter by letter, and a sole owner."""
    n, rest = divmod(length, unit)
    assert not rest, "an axis is whole units"
    some = rng.sample(range(n_devices), rng.randint(min(2, n_devices), n_devices))  # the others own nothing
    run = sorted(rng.choice(some) for _ in range(n))
    return [
        word.stretch(unit)
        for word in (
            spell(run),
            spell([some[i % len(some)] for i in range(n)]),
            spell([rng.randrange(n_devices) for _ in range(n)]),
            Word.of(rng.randrange(n_devices), n),
        )
    ]


def _states(value: Any, n_devices: int, rng: random.Random) -> list[State]:
    """States in which a value may be met: weights are never partial, and cut between quant blocks."""
    is_float = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    states: list[State] = [MIRRORED, PARTIAL] if is_float else [MIRRORED]
    shape = tuple(value.shape)
    for axis, length in enumerate(shape):
        is_packed = isinstance(value, PackedTensor) and axis == len(shape) - 1
        unit = value.format.block_size if is_packed else 1
        states.extend(Split(axis, word) for word in words(length, n_devices, rng, unit))
    return list(dict.fromkeys(states))


def _general_ways(op: Op, inputs: Sequence[Tensor], n_devices: int) -> Iterator[Way]:
    """What inference adds to every op's own ways."""
    node = op(*inputs)
    yield Way((MIRRORED,) * len(inputs), MIRRORED)
    for owner in {0, n_devices - 1}:
        if sole(node, owner) != MIRRORED:
            yield Way(tuple(sole(t, owner) for t in inputs), sole(node, owner))


def _is_legal(state: State, tensor: Tensor, n_devices: int) -> bool:
    if state == PARTIAL:
        return tensor.dtype not in (I32, CACHE)
    if isinstance(state, Split):
        is_cut_at_heads = tensor.dtype != CACHE or state.axis == 0
        letters_used = {device for device, _ in state.word.runs()}
        return state.fits(tensor.shape) and is_cut_at_heads and max(letters_used, default=0) < n_devices
    return True


def _run_part(op: Op, node: Tensor, way: Way, device: int, values: Sequence[Any]) -> torch.Tensor:
    inputs = [source(value, f"x{i}") for i, value in enumerate(values)]
    shape = way.output.local_shape(node.shape, device)
    local = op.local(inputs, way, shape, device, "local")
    assert local.shape == shape, f"{way}: device {device} makes {local!r}"
    return _readable(_evaluate(local, dict(zip(inputs, values, strict=True))))


def _evaluate(output: Tensor, values: dict[Tensor, Any]) -> Any:
    """By references, without plans or kernels."""
    known = {t: value.layer() if isinstance(value, CacheValue) else value for t, value in values.items()}
    for node in in_order([output]):
        if node not in known:
            known[node] = node.op.reference([known[t] for t in node.inputs])
    return known[output]


def _readable(value: Any) -> torch.Tensor:
    result: torch.Tensor = contents(value) if isinstance(value, BatchLayer) else value
    return result


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    if not expected.dtype.is_floating_point:
        assert actual.equal(expected), what
        return
    slack = 10 * tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    torch.testing.assert_close(
        actual, expected, rtol=10 * tolerance, atol=slack, msg=lambda m: f"{what}\n{m}"
    )
