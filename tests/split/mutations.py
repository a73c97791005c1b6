"""Rules and machinery broken in one way each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from motley.graph import Op, Tensor, Way
from motley.graph.ops import (
    Activation,
    Add,
    Attention,
    BatchMatMul,
    CacheStore,
    Concat,
    ExpertFfn,
    GetRows,
    LocalIds,
    MatMul,
    Mul,
    Permute,
    Repeat,
    Reshape,
    RmsNorm,
    Rope,
    Route,
    RouteWeights,
    SetRows,
    Slice,
    Softmax,
)
from motley.ownership import MIRRORED, PARTIAL, Split, State, Word
from motley.runtime import group
from motley.split import collectives, localize, transitions

Patch = pytest.MonkeyPatch


def change_ways(patch: Patch, cls: type[Op], change: Callable[[Way], Way]) -> None:
    """Each way that the op offers, changed."""
    original = cls.ways

    def ways(self: Op, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        return map(change, original(self, inputs, states))

    patch.setattr(cls, "ways", ways)


def add_ways(
    patch: Patch, cls: type[Op], more: Callable[[Sequence[Tensor], Sequence[State]], Iterator[Way]]
) -> None:
    """Ways that the op must not offer."""
    original = cls.ways

    def ways(self: Op, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        yield from original(self, inputs, states)
        yield from more(inputs, states)

    patch.setattr(cls, "ways", ways)


def totals(word: Word) -> Word:
    """A word with the same letters in the order of devices: all that per-device totals know of it."""
    letters = sorted(word.runs())
    return Word.concat(Word.of(device, n) for device, n in letters)


def claims_mirrored(way: Way) -> Way:
    return replace(way, output=MIRRORED) if way.output == PARTIAL and PARTIAL not in way.inputs else way


def forgets_the_order(way: Way) -> Way:
    return (
        replace(way, output=Split(way.output.axis, totals(way.output.word)))
        if isinstance(way.output, Split)
        else way
    )


def moves_to_the_first_axis(way: Way) -> Way:
    return replace(way, output=Split(0, way.output.word)) if isinstance(way.output, Split) else way


def any_cut(inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
    """The first input, however it is cut; a vector beside it is cut as its last axis is."""
    first = states[0]
    if isinstance(first, Split):
        last = len(inputs[0].shape) - 1
        others = [
            Split(0, first.word) if first.axis == last and len(t.shape) == 1 else MIRRORED for t in inputs[1:]
        ]
        yield Way((first, *others), first)


def any_cut_of_the_first(inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
    if isinstance(states[0], Split):
        yield Way((states[0], *[MIRRORED] * (len(inputs) - 1)), states[0])


def any_sum(inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
    """Addends are treated one by one."""
    if all(state == PARTIAL for state in states):
        yield Way(tuple(states), PARTIAL)


def whole_addend(inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
    if states[0] == PARTIAL:
        yield Way((PARTIAL, MIRRORED), PARTIAL)


def whole_ways(patch: Patch, cls: type[Op]) -> None:
    """The op on parts is the op as it is: ids and ranges stay those of the whole."""
    patch.setattr(cls, "local", Op.local)


def biases_everywhere(way: Way) -> Way:
    """The down bias, which one device adds while all have columns of each expert, is added by all."""
    is_by_columns = isinstance(way.inputs[3], Split) and way.inputs[3].axis == 1
    return Way((*way.inputs[:-1], MIRRORED), way.output) if is_by_columns and len(way.inputs) == 9 else way


def wrong_queries(way: Way) -> Way:
    """Queries in the order q0 q0 q1 q1 against KV heads as if they were q0 q1 q0 q1."""
    queries, kv, *sinks = way.inputs
    assert isinstance(queries, Split)
    assert isinstance(kv, Split)
    heads = Split(1, kv.word.power(len(queries.word) // len(kv.word)))
    return Way((heads, kv, *(Split(0, heads.word) for _ in sinks)), heads)


def swapped_values(way: Way) -> Way:
    """The cache holds other heads' values than keys."""
    cache, keys, values = way.inputs
    if not isinstance(values, Split):
        return way
    backwards = Word.concat(Word.of(d, n) for d, n in reversed(list(values.word.runs())))
    return Way((cache, keys, Split(1, backwards)), way.output)


def power_for_stretch(way: Way) -> Way:
    source, target = way.inputs[0], way.output
    if isinstance(source, Split) and isinstance(target, Split) and len(target.word) != len(source.word):
        return replace(
            way, output=Split(target.axis, source.word.power(len(target.word) // len(source.word)))
        )
    return way


def in_order_of_devices(out: torch.Tensor, parts: Mapping[int, torch.Tensor], axis: int, word: Word) -> None:
    out.copy_(torch.cat(list(parts.values()), axis))


def first_indices(whole: torch.Tensor, axis: int, word: Word, device: int) -> torch.Tensor:
    """As if every word were a run."""
    start = sum(word.count(other) for other in range(device))
    return whole.narrow(axis, start, word.count(device))


def by_totals(self: Split, other: object) -> bool:
    return isinstance(other, Split) and (self.axis, totals(self.word)) == (other.axis, totals(other.word))


RULES: dict[str, tuple[type[Op], Callable[[Patch, type[Op]], None]]] = {
    "matmul: sums over parts of K claim to be whole": (MatMul, lambda p, c: change_ways(p, c, claims_mirrored)),
    "matmul: rows of W in another order": (MatMul, lambda p, c: change_ways(p, c, forgets_the_order)),
    "matmul: a product of sums": (MatMul, lambda p, c: add_ways(p, c, any_sum)),
    "batch matmul: sums claim to be whole": (BatchMatMul, lambda p, c: change_ways(p, c, claims_mirrored)),
    "experts: sums claim to be whole": (ExpertFfn, lambda p, c: change_ways(p, c, claims_mirrored)),
    "experts: ids of the whole": (ExpertFfn, whole_ways),
    "experts: every device adds the down bias": (ExpertFfn, lambda p, c: change_ways(p, c, biases_everywhere)),
    "route: experts are cut": (Route, lambda p, c: add_ways(p, c, any_cut_of_the_first)),
    "route weights: of addends": (RouteWeights, lambda p, c: add_ways(p, c, whole_addend)),
    "norm: rows are cut": (RmsNorm, lambda p, c: add_ways(p, c, any_cut)),
    "softmax: rows are cut": (Softmax, lambda p, c: add_ways(p, c, any_cut)),
    "softmax: of addends": (Softmax, lambda p, c: add_ways(p, c, any_sum)),
    "activation: of addends": (Activation, lambda p, c: add_ways(p, c, any_sum)),
    "mul: of addends": (Mul, lambda p, c: add_ways(p, c, any_sum)),
    "add: a whole addend on every device": (Add, lambda p, c: add_ways(p, c, whole_addend)),
    "rope: pairs are cut": (Rope, lambda p, c: add_ways(p, c, any_cut_of_the_first)),
    "attention: queries of another KV head": (Attention, lambda p, c: change_ways(p, c, wrong_queries)),
    "cache: values of other heads": (CacheStore, lambda p, c: change_ways(p, c, swapped_values)),
    "reshape: word of another order": (Reshape, lambda p, c: change_ways(p, c, forgets_the_order)),
    "permute: the axis stays": (Permute, lambda p, c: change_ways(p, c, moves_to_the_first_axis)),
    "slice: the range of the whole": (Slice, whole_ways),
    "concat: word of another order": (Concat, lambda p, c: change_ways(p, c, forgets_the_order)),
    "repeat: the word repeated, not its letters": (Repeat, lambda p, c: change_ways(p, c, power_for_stretch)),
    "get rows: ids of the whole": (GetRows, whole_ways),
    "set rows: ids of the whole": (SetRows, whole_ways),
}  # fmt: skip


def keeps_it_everywhere(self: Any, whole: Tensor, target: State, name: str) -> Tensor | None:
    """From mirrored to partial, as if that needed nothing."""
    return whole if target == PARTIAL else ORIGINAL_CUT(self, whole, target, name)


ORIGINAL_CUT = localize._Walk._cut
ORIGINAL_COLLECTIVE = transitions.collective_between


def forgets_earlier_ranges(self: LocalIds, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    ids, result = inputs[0], torch.full_like(inputs[0], -1)
    for start, stop in self.word.global_ranges(self.device):
        result = torch.where((ids >= start) & (ids < stop), ids - start, result)
    return result


def says_nothing_of_sums(source: State, target: State) -> str:
    return "" if source == PARTIAL else ORIGINAL_COLLECTIVE(source, target)


def drops_the_last(out: torch.Tensor, parts: Sequence[Any]) -> None:
    out.copy_(sum(parts[:-1], torch.zeros_like(out)))


MACHINERY: dict[str, tuple[Any, str, Any]] = {
    "all-gather joins in the order of devices": (group, "_join_into", in_order_of_devices),
    "reduce-scatter takes the first indices": (group, "take", first_indices),
    "shard takes the first indices": (collectives, "take", first_indices),
    "all-reduce drops a device": (group, "_sum_into", drops_the_last),
    "a mirrored tensor is an addend on every device": (localize._Walk, "_cut", keeps_it_everywhere),
    "sums are said to need no collective": (transitions, "collective_between", says_nothing_of_sums),
}
