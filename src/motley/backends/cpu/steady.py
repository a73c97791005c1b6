"""The same sequences in step after step: all that stays the same is staged once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from motley.backends.cpu.native import core

if TYPE_CHECKING:
    from motley.backends.cpu.backend import CpuExecutable


class CpuSteady:
    """The native programs of a crew, and the inputs that do not change (base.SteadyProgram)."""

    def __init__(
        self,
        members: Sequence[CpuExecutable],
        team: Any,
        inputs: Sequence[Mapping[str, Any]],
        n_groups: int,
        settings: Sequence[Any],
    ) -> None:
        """`inputs`: of a batch of one row for each sequence, which the members are bound to."""
        self._team = team
        self._settings = settings  # the native object has their addresses
        self._programs: list[tuple[CpuExecutable, Any]] = []  # all that it may run, with their executables
        self._native = core.SteadyBatch(len(settings), n_groups, members[0].outputs[0].shape[1], settings)
        self.inputs = inputs
        self.add(members)

    def add(self, members: Sequence[CpuExecutable]) -> None:
        """Adds the crew's programs for steps of more rows. They must have been compiled."""
        devices = [member.steady_inputs(own) for member, own in zip(members, self.inputs, strict=True)]
        self._programs += [(member, device[0]) for member, device in zip(members, devices, strict=True)]
        logits = members[0].outputs[0]
        self._native.add(len(logits), devices, logits.data_ptr())

    @property
    def is_current(self) -> bool:
        return all(member.has_program(program) for member, program in self._programs)

    def place(self, group: int, block_size: int, tables: Sequence[tuple[int, Any]]) -> None:
        rows = [(row, 1, first, first, blocks) for row, (first, blocks) in enumerate(tables)]
        self._native.place(group, block_size, rows)

    def run(
        self,
        tokens: list[int],
        positions: list[int],
        indexes: list[int],
        n_rounds: int = 1,
        stops: Sequence[int] = (),
    ) -> list[list[int]]:
        found: list[list[int]] = self._team.steps(self._native, tokens, positions, indexes, n_rounds, stops)
        return found

    def run_rows(
        self, tokens: list[int], counts: list[int], positions: list[int], indexes: list[int]
    ) -> list[int]:
        found: list[int] = self._team.rows(self._native, tokens, counts, positions, indexes)
        return found
