"""The number of rows from which copying a CPU's weights to a GPU takes less time than computing with them, measured.

The CPU's time for a batch grows with its rows: it reads the weights, then multiplies each row. A copy takes the same
time for any number of rows, and the GPU computes meanwhile. Both are measured once, when the weights are loaded, on the
product that reads most: a layer's experts, or a matrix. All layers are alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from motley.backends import Backend, LoadedWeight
from motley.graph import F32, I32, Graph, Tensor
from motley.graph.ops import ExpertFfn, Input, MatMul, Weight
from motley.plan import DevicePlan
from motley.runtime.loading import packed_bytes

Clock = Callable[[], float]

# The CPU is measured with so many rows. With fewer than the first, it does not read all experts: the line ends there.
_MEASURED_ROWS = (32, 128)
MIN_ROWS = _MEASURED_ROWS[0]
_MAX_ROWS = 2**16  # more than any batch has
_N_TIMES = 3


def crossover(seconds: Mapping[int, float], copy_seconds: float) -> int:
    """The rows from which copying takes less time, for the CPU's `seconds` by two numbers of rows.

    The nearest of 32, 48, 64, 96, …: noise seldom changes it, so that a batch goes the same way in the next process.
    """
    (few, first), (many, second) = sorted(seconds.items())
    growth = (second - first) / (many - few)
    if copy_seconds <= first:
        return MIN_ROWS
    if growth <= 0 or copy_seconds >= first + growth * _MAX_ROWS:
        return _MAX_ROWS
    rows = few + (copy_seconds - first) / growth
    sizes = [n for power in range(5, 17) for n in (1 << power, 3 << power - 1)]
    return min(sizes, key=lambda size: max(size / rows, rows / size))


def measured_rows(
    graph_of: Callable[[int], Graph],
    owner: tuple[Backend, Mapping[str, LoadedWeight]],
    borrower: tuple[Backend, Mapping[str, LoadedWeight]],
    clock: Clock = time.perf_counter,
) -> int | None:
    """`crossover`, measured; None: the borrower cannot tell how long it copies. To be called by the owner's thread.

    `graph_of`: the owner's graph for a number of rows. `owner`, `borrower`: backends, and their weights by name.
    """
    graph = graph_of(MIN_ROWS)
    product = _heaviest_product(graph, borrower[1])
    if product is None:
        return None
    names = [t.name for t in product.inputs if isinstance(t.op, Weight) and t.name in borrower[1]]
    copy_seconds = borrower[0].copy_seconds([borrower[1][name] for name in names])
    if copy_seconds is None:
        return None
    seconds = {}
    for n in _MEASURED_ROWS:
        node = next(each for each in graph_of(n).nodes if each.name == product.name)
        seconds[n] = _product_seconds(node, *owner, clock)
    return crossover(seconds, copy_seconds)


def _heaviest_product(graph: Graph, borrowed: Mapping[str, LoadedWeight]) -> Tensor | None:
    """The product that reads the most bytes of borrowed weights; of equal ones, the first."""
    products = [node for node in graph.nodes if isinstance(node.op, ExpertFfn | MatMul)]
    sizes = [sum(packed_bytes(t) for t in node.inputs if t.name in borrowed) for node in products]
    return products[sizes.index(max(sizes))] if any(sizes) else None


def _product_seconds(
    node: Tensor, backend: Backend, weights: Mapping[str, LoadedWeight], clock: Clock
) -> float:
    """How long the product takes by itself: the shortest of a few times (other programs only add), after a warm-up."""
    stand_ins = [t if isinstance(t.op, Weight) else Input(t.shape, t.dtype)(name=t.name) for t in node.inputs]
    inputs = {t.name: _values(t, node.inputs) for t in stand_ins if not isinstance(t.op, Weight)}
    alone = Graph.of(node.op(*stand_ins, name=node.name))
    program = backend.prepare(DevicePlan.of(alone, backend.kernels), weights)
    times = []
    for _ in range(1 + _N_TIMES):
        started = clock()
        program.run(inputs)
        times.append(clock() - started)
    return min(times[1:])


def _values(stand_in: Tensor, inputs: Sequence[Tensor]) -> torch.Tensor:
    """Numbers of an ordinary size; of experts, ids that differ in each row and use all experts alike."""
    generator = torch.Generator().manual_seed(1)
    if stand_in.dtype != I32:
        assert stand_in.dtype == F32, stand_in
        return torch.randn(stand_in.shape, generator=generator)
    n_experts = inputs[3].shape[0]  # of the gates: see `ExpertFfn`
    scores = torch.rand(stand_in.shape[0], n_experts, generator=generator)
    return scores.argsort(1)[:, : stand_in.shape[1]].int().contiguous()
