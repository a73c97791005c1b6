"""`SteadyRun`: one token for each of the same sequences, in step after step. Block tables are set when they change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from motley.backends import SteadyProgram
from motley.kvcache.leases import Lease
from motley.runtime.worker import Worker


class _Runner(Protocol):
    n_runs: int
    local: Worker

    @property
    def is_demand_paged(self) -> bool: ...


class SteadyRun:
    """Runs the next tokens of some sequences, and chooses those that follow, in one call. See `Runner.steady`."""

    def __init__(self, runner: _Runner, program: SteadyProgram) -> None:
        self._runner = runner
        self._program = program

    @property
    def is_current(self) -> bool:
        """Whether it can still run; if not, another has to be made."""
        return self._program.is_current

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
