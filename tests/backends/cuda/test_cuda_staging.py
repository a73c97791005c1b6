"""A batch in one range of memory: every row finds its numbers there, whatever pads it and however it grows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from motley.backends.cuda.staging import Place, Staging
from motley.kvcache.arena import GroupBatch, SequenceTable

SIZE, N_ROWS, FEW = 16, 40, 8

Sequences = list[tuple[int, int, int]]  # of each: rows, context before them, blocks dropped before that
SEQUENCES = st.lists(
    st.tuples(st.sampled_from([1, 1, 2, FEW, FEW + 1]), st.integers(0, 300), st.integers(0, 2)),
    min_size=1,
    max_size=4,
)


def make_tables(sequences: Sequences) -> list[SequenceTable]:
    tables, row, block = [], 0, 0
    for n_rows, n_before, n_holes in sequences:
        first = min(n_holes, n_before // SIZE) * SIZE
        n_blocks = -(-(n_before + n_rows - first) // SIZE)
        blocks = np.arange(block, block + n_blocks, dtype=np.int32)[::-1].copy()
        tables.append(SequenceTable(row, n_rows, n_before, first, blocks))
        row, block = row + n_rows, block + n_blocks
    return tables


def table_at(place: Place, single: int, n_blocks: int) -> list[int]:
    """What the kernels read: the first position, then block ids."""
    start = int(place.tables.row_table[single])
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
            singles = [(table, i) for table in tables if table.n_rows <= FEW for i in range(table.n_rows)]
            rows = [table.first_row + i for table, i in singles]
            assert place.single_rows.tolist()[: len(singles)] == rows
            for number, (table, i) in enumerate(singles):
                assert int(place.tables.row_position[number]) == table.position + i
                assert table_at(place, number, len(table.blocks)) == [table.first, *table.blocks.tolist()]
            chunks = [table for table in tables if table.n_rows > FEW]
            for table, span in zip(chunks, place.spans.tolist(), strict=True):
                *numbered, start = span
                assert numbered == [table.first_row, table.n_rows, table.position]
                numbers = place.numbers[start : start + 1 + len(table.blocks)].tolist()
                assert numbers == [table.first, *table.blocks.tolist()]
            assert place.is_decode == (not chunks)
            if not chunks:  # rows that pad the batch end before their table begins: they read nothing
                for i in range(len(singles), N_ROWS):
                    assert int(place.tables.row_position[i]) == table_at(place, i, 0)[0] - SIZE


def test_memory_moves_only_when_it_is_outgrown() -> None:
    staging = Staging({"tokens": N_ROWS}, 1, SIZE, 128, torch.device("cpu"))
    tokens = {"tokens": torch.zeros(1, dtype=torch.int32)}
    addresses = [
        staging.write(tokens, {0: GroupBatch.of(make_tables([(1, n_before, 0)]), SIZE)}).address
        for n_before in (0, 50_000, 300_000, 0, 500_000)
    ]
    assert addresses[0] == addresses[1] != addresses[2] == addresses[3] == addresses[4]
