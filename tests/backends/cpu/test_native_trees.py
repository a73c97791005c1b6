"""Attention of rows that are a tree: each is as a row after its own path alone, on the native backend to the bit."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from native_driver import INSTRUCTION_SETS, CpuBackend, ReferenceBackend, run_graph
from test_native_cache import QUANTIZED, Case, relative_error

from motley.backends.cpu import is_available
from motley.engine.trees import depths, path_to, row_masks
from motley.kvcache.arena import ArenaLayer, GroupBatch
from motley.kvcache.types import CACHE_TYPES

if not is_available():
    pytest.skip("the native module is not built", allow_module_level=True)

N_ROWS = 24


def random_parents(seed: int, n_tokens: int = N_ROWS - 1) -> tuple[int, ...]:
    """A tree in which some branches are long and some tokens have many alternatives."""
    rng = random.Random(seed)
    return tuple(rng.choice((i - 1, i - 1, rng.randrange(-1, i))) for i in range(n_tokens))


def with_tree(case: Case, parents: tuple[int, ...]) -> Case:
    """The case, its first sequence's rows as a tree."""
    masks = np.array(row_masks(parents), np.uint64)
    first, *others = case.batch.tables
    case.batch = GroupBatch(case.batch.slots, (replace(first, seen=masks), *others))
    case.inputs["cache.0"] = ArenaLayer(case.keys, case.values, case.rows, 0).on(case.batch)
    return case


def alone(case: Case, path: list[int], backend: object, window: int | None) -> torch.Tensor:
    """The result of the last row of a path, whose rows are computed next to each other."""
    rows = [0, *(i + 1 for i in path)]
    table = replace(case.batch.tables[0], n_rows=len(rows), seen=None)
    n_blocks = -(-(table.position + len(rows) - table.first) // case.keys.block_size)
    table = replace(table, blocks=table.blocks[:n_blocks])
    batch = GroupBatch.of([table], case.keys.block_size)
    inputs = {name: case.inputs[name][rows] for name in "qkv"}
    inputs["cache.0"] = ArenaLayer(case.keys, case.values, case.rows, 0).on(batch)
    n_tokens, case.n_tokens = case.n_tokens, len(rows)
    try:
        return run_graph(backend, case.graph(window=window), inputs, {})[0][-1]
    finally:
        case.n_tokens = n_tokens


def tree_case(kind: str, context: int, block_size: int) -> Case:
    return Case(kind, kind, contexts=(context,), n_new=(N_ROWS,), block_size=block_size)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("context", "block_size"), [(0, 16), (3, 5), (70, 16), (120, 32), (125, 16), (300, 16)]
)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_row_sees_its_own_path(backend: str, kind: str, context: int, block_size: int) -> None:
    own = ReferenceBackend() if backend == "reference" else CpuBackend()
    parents = random_parents(context)
    for window in (None, 6, 40):
        case = with_tree(tree_case(kind, context, block_size), parents)
        found = case.run(own, window=window)
        for i in range(-1, N_ROWS - 1):
            expected = alone(case, path_to(parents, i), own, window)
            if backend == "cpu":
                assert torch.equal(found[i + 1], expected), (window, i)
            else:
                assert relative_error(found[i + 1], expected) < 1e-5, (window, i)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_trees_of_every_cache_type_are_the_references(kind: str, instruction_set: str) -> None:
    parents = random_parents(1)
    results = [
        with_tree(tree_case(kind, 110, 16), parents).run(backend)
        for backend in (ReferenceBackend(), CpuBackend(instruction_set))
    ]
    assert relative_error(results[1], results[0]) < (0.02 if kind in QUANTIZED else 1e-5)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_trees_after_long_contexts_are_split_over_threads(n_threads: int) -> None:
    parents, before = random_parents(2), torch.get_num_threads()
    case = with_tree(
        Case("f16", "f16", contexts=(1200,), n_new=(N_ROWS,), block_size=64, heads=(2, 1)), parents
    )
    expected = case.run(ReferenceBackend())
    try:
        torch.set_num_threads(n_threads)
        assert relative_error(case.run(CpuBackend()), expected) < 1e-5
    finally:
        torch.set_num_threads(before)


def test_a_tree_of_64_rows_beside_other_sequences() -> None:
    parents = random_parents(3, 63)
    assert max(depths(parents)) > 5
    case = with_tree(Case("f32", "f32", contexts=(40, 9), n_new=(64, 3), block_size=16), parents)
    plain = Case("f32", "f32", contexts=(40, 9), n_new=(64, 3), block_size=16).run(CpuBackend())
    found = case.run(CpuBackend())
    assert relative_error(found, case.run(ReferenceBackend())) < 1e-5
    assert torch.equal(found[64:], plain[64:])
    assert not torch.equal(found[:64], plain[:64])


def test_masks_that_are_no_tree_are_refused() -> None:
    for masks in ([1, 3, 3], [1, 2, 12], [1, 0, 4]):
        case = Case("f16", "f16")
        table = replace(case.batch.tables[0], seen=np.array(masks, np.uint64))
        case.batch = GroupBatch(case.batch.slots, (table,))
        case.inputs["cache.0"] = ArenaLayer(case.keys, case.values, case.rows, 0).on(case.batch)
        with pytest.raises(ValueError, match="not those of a tree"):
            case.run(CpuBackend())
