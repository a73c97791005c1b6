"""Random graphs over all ops on random crews, their inputs and weights placed at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graph_steps import PACKED_SIZES, SIZES, STEPS, GraphMaker
from rule_checks import words
from split_runner import check_split

from motley.errors import SplitError
from motley.formats import PackedTensor
from motley.graph import CACHE, I32, Graph, Tensor
from motley.graph.ops import Weight
from motley.ownership import MIRRORED, PARTIAL, Split, State, Word
from motley.split.infer import SplitGraph, infer


@dataclass(frozen=True)
class Case:
    """A graph, values for its sources, and how those lie on a crew."""

    graph: Graph
    values: dict[str, Any]
    n_devices: int
    placement: dict[str, State]

    @cached_property
    def allowed_placement(self) -> dict[str, State]:
        """The placement; if weights would have to travel, that of inputs, which no inference may refuse."""
        try:
            infer(self.graph, self.n_devices, self.placement)
        except SplitError:
            weights = {t.name for t in self.graph.weights}
            return {name: state for name, state in self.placement.items() if name not in weights}
        return self.placement


def random_case(rng: random.Random, max_steps: int = 8) -> Case:
    make = GraphMaker(rng)
    make.keep(make.input(make.size(), make.rng.choice([*SIZES, *PACKED_SIZES])))
    make.keep(make.input(*(make.size() for _ in range(make.rng.randint(1, 3)))))
    for _ in range(rng.randint(1, max_steps)):
        made = STEPS[rng.choice(list(STEPS))](make)
        if made is not None:
            make.keep(made)
    outputs = [make.tensors[-1], *rng.sample(make.tensors, rng.randint(0, min(2, len(make.tensors))))]
    if make.choices and rng.random() < 0.3:
        outputs.append(make.choices[-1][0])
    graph = Graph.of(*dict.fromkeys(outputs))
    n_devices = rng.randint(1, 7)
    placement = _random_placement(rng, graph, make.values, n_devices)
    for matrices in make.experts:
        if all(t.name in placement for t in matrices):
            placement |= _experts_alike(rng, matrices, make.values, n_devices)
    return Case(graph, make.values, n_devices, placement)


def check_case(case: Case) -> SplitGraph:
    return check_split(case.graph, case.values, case.n_devices, case.allowed_placement)


def _experts_alike(
    rng: random.Random, matrices: list[Tensor], values: dict[str, Any], n_devices: int
) -> dict[str, State]:
    """Whole experts, or columns of every expert: matrices that are placed one by one do not fit together."""
    is_of_rows = any(isinstance(t.op, Weight) and t.op.rows for t in matrices)
    matrices, biases = matrices[:3], matrices[3:]
    axes, unit = ((0, 0, 0), 1) if is_of_rows or rng.random() < 0.5 else ((1, 1, 2), 0)
    down = matrices[2]
    word = rng.choice(words(down.shape[axes[2]], n_devices, rng, unit or values[down.name].format.block_size))
    states: dict[str, State] = {t.name: Split(axis, word) for t, axis in zip(matrices, axes, strict=True)}
    return states | {t.name: MIRRORED for t in biases}  # which lie as the matrices ask for


def _random_placement(
    rng: random.Random, graph: Graph, values: dict[str, Any], n_devices: int
) -> dict[str, State]:
    """Axes of one length share few words, so that it often happens that two inputs lie alike."""
    known: dict[tuple[int, int], list[Word]] = {}
    placement: dict[str, State] = {}
    for node in (t for t in graph.nodes if t.name in values):
        value = values[node.name]
        kind = rng.randrange(10)
        if kind < 3:
            placement[node.name] = MIRRORED
        elif kind == 3 and node.dtype not in (I32, CACHE) and not isinstance(value, PackedTensor):
            placement[node.name] = PARTIAL
        else:
            is_rows = node.dtype == CACHE or (isinstance(node.op, Weight) and node.op.rows)
            axis = 0 if is_rows else rng.randrange(len(node.shape))
            is_last = axis == len(node.shape) - 1
            unit = value.format.block_size if isinstance(value, PackedTensor) and is_last else 1
            key = node.shape[axis], unit
            if key not in known:
                *shared, alone = words(node.shape[axis], n_devices, rng, unit)
                known[key] = [*rng.sample(shared, 2), *rng.sample([*shared, alone], 1)]
            placement[node.name] = Split(axis, rng.choice(known[key]))
    return placement
