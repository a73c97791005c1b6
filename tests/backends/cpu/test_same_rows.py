"""A row has the same bits in a batch of any size: drafts and other requests change no text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from native_driver import INSTRUCTION_SETS, CpuBackend, ExactCpuBackend, run_graph, run_op
from test_native_cache import Case
from test_native_products import draw_weight

from motley.backends.cpu.native import FORMATS as NATIVE_FORMATS
from motley.backends.cpu.native import PLAIN_FORMATS
from motley.graph.ops import MatMul
from motley.kvcache.arena import ArenaLayer, GroupBatch
from motley.kvcache.types import CACHE_TYPES


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", NATIVE_FORMATS)
def test_a_product_of_a_row_is_the_same_beside_other_rows(name: str, instruction_set: str) -> None:
    # More columns than a panel has, and a number of rows and columns that fills no vector.
    weight = draw_weight(name, n_rows=37, n_blocks=551 if name in PLAIN_FORMATS else 3)
    x = torch.randn(40, weight.shape[1], generator=torch.Generator().manual_seed(1))
    for backend in (CpuBackend(instruction_set), ExactCpuBackend(instruction_set)):
        alone = torch.cat([run_op(backend, MatMul(), [x[i : i + 1], weight]) for i in range(40)])
        for n in (2, 3, 4, 7, 8, 16, 33, 40):
            assert torch.equal(run_op(backend, MatMul(), [x[:n], weight]), alone[:n]), f"{n} rows"


@pytest.fixture(params=[1, 3])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def some_rows(case: Case, backend: CpuBackend, first: int, n: int, window: int | None = None) -> torch.Tensor:
    """Attention of rows first … first + n of the case's only sequence, in a batch of their own. With a window, the
    blocks that no row sees are given back, as the engine does.
    """
    whole, size = case.batch.tables[0], case.keys.block_size
    position = whole.position + first
    n_holes = max(position - window + 1, 0) // size if window else 0
    blocks = whole.blocks[n_holes : -(-(position + n) // size)]
    table = replace(whole, n_rows=n, position=position, first=n_holes * size, blocks=blocks)
    inputs = {name: case.inputs[name][first : first + n] for name in "qkv"}
    inputs["cache.0"] = ArenaLayer(case.keys, case.values, case.rows, 0).on(GroupBatch.of([table], size))
    n_tokens, case.n_tokens = case.n_tokens, n
    try:
        return run_graph(backend, case.graph(window=window), inputs, {})[0]
    finally:
        case.n_tokens = n_tokens


def require_equal_rows(case: Case, backend: CpuBackend, n_rows: int, window: int | None = None) -> None:
    """Each row alone, and parts of the batch, have the bits of the whole batch."""
    whole = some_rows(case, backend, 0, n_rows, window)
    assert whole.isfinite().all()
    for n in (1, 2, 3, 5, 8, n_rows - 1):
        for first in range(0, n_rows - n + 1, n):
            found = some_rows(case, backend, first, n, window)
            assert torch.equal(found, whole[first : first + n]), f"rows {first} … {first + n - 1}"


# Splits begin at multiples of 256 keys, and of 512 from 3,841 keys on: rows on both sides of such a limit.
@pytest.mark.parametrize("context", [0, 120, 245, 505, 3830])
@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_a_rows_attention_is_the_same_beside_other_rows(kind: str, context: int, n_threads: int) -> None:
    case = Case(kind, kind, contexts=(context,), n_new=(16,), block_size=128, heads=(2, 1), dim=32)
    require_equal_rows(case, CpuBackend(), 16)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q5_1", "q4_0"])
def test_a_rows_attention_is_the_same_with_every_instruction_set(kind: str, instruction_set: str) -> None:
    case = Case(kind, kind, contexts=(1018,), n_new=(13,), block_size=64, heads=(12, 2), dim=80)
    require_equal_rows(case, CpuBackend(instruction_set), 13)


@pytest.mark.parametrize("window", [100, 384])
@pytest.mark.parametrize("block_size", [16, 20, 48])
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q5_1"])
def test_a_rows_attention_is_the_same_wherever_its_blocks_begin(
    kind: str, block_size: int, window: int, n_threads: int
) -> None:
    case = Case(kind, kind, contexts=(600,), n_new=(16,), block_size=block_size, heads=(2, 1), dim=32)
    require_equal_rows(case, CpuBackend(), 16, window)


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_1"])
def test_a_rows_attention_is_the_same_with_any_number_of_threads(kind: str) -> None:
    case = Case(kind, kind, contexts=(1500, 300), n_new=(2, 1), block_size=64, heads=(4, 2))
    before, found = torch.get_num_threads(), []
    try:
        for n_threads in (1, 2, 5):
            torch.set_num_threads(n_threads)
            found.append(case.run(CpuBackend()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
