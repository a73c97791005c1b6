"""`SteadyRun`: the next tokens of the same sequences, in step after step. Block tables are set when they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from motley.backends import SteadyProgram
from motley.kvcache.leases import Lease
from motley.models import BatchShape
from motley.runtime.worker import Worker


class _Runner(Protocol):
    n_runs: int
    local: Worker

    @property
    def is_demand_paged(self) -> bool: ...

    def padded(self, shape: BatchShape) -> BatchShape: ...


class SteadyRun:
    """Runs the next tokens of some sequences, and chooses those that follow, in one call. See `Runner.steady`."""

    def __init__(self, runner: _Runner, program: SteadyProgram, shape: BatchShape) -> None:
        """`shape`: of a batch with one token of each sequence."""
        self._runner = runner
        self._program = program
        self._shape = shape
        self._shapes = {runner.padded(shape)}  # that the program can run
        self._has_rows: dict[int, bool] = {}  # the results of `has_rows`

    @property
    def is_current(self) -> bool:
        """Whether it can still run; if not, another has to be made."""
        return self._program.is_current

    def has_rows(self, n_rows: int) -> bool:
        """Whether `run_rows` can have so many rows. Makes a plan for them if there is none."""
        found = self._has_rows.get(n_rows)
        if found is None:
            found = self._has_rows[n_rows] = self._add_rows(n_rows)
        return found and self._program.is_current  # a new plan may have moved activations

    def _add_rows(self, n_rows: int) -> bool:
        shape = self._runner.padded(replace(self._shape, n_tokens=n_rows, n_outputs=n_rows))
        if shape in self._shapes:
            return True
        if not self._runner.local.add_rows(self._program, shape):
            return False
        self._shapes.add(shape)
        return True

    def place(self, lease: Lease) -> None:
        """Takes the sequences' block tables. The lease must be valid at every run."""
        for group, tables in enumerate(lease.tables):
            self._program.place(group, lease.block_size, tables)
            if self._runner.is_demand_paged:
                self._runner.local.fill(group, [block for table in tables for block in table.blocks])

    def run(
        self,
        tokens: list[int],
        positions: list[int],
        indexes: list[int],
        n_rounds: int = 1,
        stops: Sequence[int] = (),
    ) -> list[list[int]]:
        """For each round the next token of each sequence, NONE_LEFT or NOT_FINITE, which are the next round's inputs.

        The lease must reach as far as the last round. `indexes`: of the tokens in their answers. The round that gives
        one of `stops` is the last.
        """
        rounds = self._program.run(tokens, positions, indexes, n_rounds, stops)
        self._runner.n_runs += len(rounds)
        return rounds

    def run_rows(
        self, tokens: list[int], counts: list[int], positions: list[int], indexes: list[int]
    ) -> list[int]:
        """The token after each of `tokens`, NONE_LEFT or NOT_FINITE, as if all of them were right: the next token of
        each sequence, then its draft. `counts`: of each sequence's tokens. The lease must have slots for them.
        """
        chosen = self._program.run_rows(tokens, counts, positions, indexes)
        self._runner.n_runs += 1
        return chosen
