"""A batch in one range of memory: every row finds its numbers there, whatever pads it and however it grows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from motley.backends.cuda.staging import Place, Staging
from motley.engine.trees import row_masks
from motley.kvcache.arena import GroupBatch, SequenceTable

SIZE, N_ROWS, FEW, MOST = 16, 140, 8, 16

Sequences = list[
    tuple[int, int, int, bool]
]  # of each: rows, context before them, blocks dropped before that, whether they are a tree
SEQUENCES = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 2, FEW, FEW + 1, MOST, MOST + 1, 2 * MOST]),
        st.integers(0, 300),
        st.integers(0, 2),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


def make_tables(sequences: Sequences) -> list[SequenceTable]:
    tables, row, block = [], 0, 0
    for n_rows, n_before, n_holes, is_tree in sequences:
        first = min(n_holes, n_before // SIZE) * SIZE
        n_blocks = -(-(n_before + n_rows - first) // SIZE)
        blocks = np.arange(block, block + n_blocks, dtype=np.int32)[::-1].copy()
        seen = np.array(row_masks([-1] * (n_rows - 1)), np.uint64) if is_tree else None
        tables.append(SequenceTable(row, n_rows, n_before, first, blocks, seen))
        row, block = row + n_rows, block + n_blocks
    return tables


def masks_of(table: SequenceTable) -> list[int]:
    return list(row_masks(range(-1, table.n_rows - 2))) if table.seen is None else table.seen.tolist()


def table_at(place: Place, bundle: int, n_blocks: int) -> list[int]:
    """What the kernels read: the first position, then block ids."""
    start = int(place.tables.table[bundle])
    first = int(place.tables.firsts[start])
    return [first, *place.tables.blocks[start : start + n_blocks, 0].tolist()]


@given(st.lists(SEQUENCES, min_size=1, max_size=4))
def test_rows_find_their_numbers(batches: list[Sequences]) -> None:
    staging = Staging({"tokens": N_ROWS, "output_rows": 4}, 2, SIZE, 128, torch.device("cpu"))
    for sequences in batches:
        tables = make_tables(sequences)
        groups = dict.fromkeys((0, 3), GroupBatch.of(tables, SIZE))  # two groups may share a batch's tables
        n_tokens = sum(table.n_rows for table in tables)
        tokens = torch.arange(n_tokens, dtype=torch.int32) + 5
        staged = staging.write({"tokens": tokens, "output_rows": torch.zeros(1, dtype=torch.int32)}, groups)
        assert staged.values["tokens"].tolist() == [*tokens.tolist(), *[0] * (N_ROWS - n_tokens)]
        for group_number, group in groups.items():
            place = staged.places[group_number]
            assert place.slots.tolist() == [*group.slots.tolist(), *[-1] * (N_ROWS - n_tokens)]
            is_decode = all(table.n_rows <= MOST or table.seen is not None for table in tables)
            few = [table for table in tables if is_decode or table.n_rows <= FEW or table.seen is not None]
            bundles, masks = [], []  # (table, its first row that counts, rows)
            for table in few:
                is_whole = is_decode or table.seen is not None
                bundles += (
                    [(table, 0, table.n_rows)] if is_whole else [(table, i, 1) for i in range(table.n_rows)]
                )
                masks += masks_of(table) if is_whole else [1] * table.n_rows
            found = place.tables
            assert found.row is not None
            assert found.count is not None
            assert found.seen is not None
            rows = [row for table in few for row in range(table.first_row, table.first_row + table.n_rows)]
            assert place.members.tolist() == ([] if is_decode else rows)
            counts = [count for *_, count in bundles]
            assert found.row.tolist()[: len(bundles)] == [sum(counts[:i]) for i in range(len(counts))]
            assert found.most_rows >= max(counts, default=1)
            if found.most_rows > 1:
                assert found.count.tolist()[: len(bundles)] == counts
                assert found.seen.numpy().view(np.uint64).ravel()[: len(rows)].tolist() == masks
            for number, (table, i, _) in enumerate(bundles):
                assert int(found.position[number]) == table.position + i
                assert table_at(place, number, len(table.blocks)) == [table.first, *table.blocks.tolist()]
            chunks = [table for table in tables if table not in few]
            for table, span in zip(chunks, place.spans.tolist(), strict=True):
                *numbered, start = span
                assert numbered == [table.first_row, table.n_rows, table.position]
                numbers = place.numbers[start : start + 1 + len(table.blocks)].tolist()
                assert numbers == [table.first, *table.blocks.tolist()]
            assert place.is_decode == (not chunks)
            if (
                is_decode
            ):  # what pads the batch has no rows, or ends before its table begins: it reads nothing
                assert len(found.table) in (N_ROWS, 1, 2, 4)
                for i in range(len(bundles), len(found.table)):
                    assert int(found.position[i]) == table_at(place, i, 0)[0] - SIZE
                    assert int(found.count[i]) == 0


def test_memory_moves_only_when_it_is_outgrown() -> None:
    staging = Staging({"tokens": 80}, 1, SIZE, 128, torch.device("cpu"))
    tokens = {"tokens": torch.zeros(1, dtype=torch.int32)}
    addresses = [
        staging.write(tokens, {0: GroupBatch.of(make_tables([(1, n_before, 0, False)]), SIZE)}).address
        for n_before in (0, 50_000, 300_000, 0, 500_000)
    ]
    assert addresses[0] == addresses[1] != addresses[2] == addresses[3] == addresses[4]
