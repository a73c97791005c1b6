"""The same sequences in step after step, with one token each: all that stays the same is staged once."""

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
        """`inputs`: of a batch that the members are bound to."""
        self._members = members
        self._team = team
        self._settings = settings  # the native object has their addresses
        devices = [member.steady_inputs(own) for member, own in zip(members, inputs, strict=True)]
        self._programs = [device[0] for device in devices]
        logits = members[0].outputs[0]
        self._native = core.SteadyBatch(
            devices, len(settings), n_groups, logits.data_ptr(), logits.shape[1], settings
        )

    @property
    def is_current(self) -> bool:
        own = zip(self._members, self._programs, strict=True)
        return all(member.has_program(program) for member, program in own)

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
