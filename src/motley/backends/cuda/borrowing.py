"""Matrices that another device has, copied to the GPU for one batch: stage after stage, into a few sets of planes.

While the GPU computes a stage, those of the next stages are copied from pinned memory and repacked, in portions, on two
streams: one portion is repacked while the next one is copied. A set is written again when its stage has been computed.

    copies     ▒▒ stage 0 ▒▒▒▒ stage 1 ▒▒▒▒ stage 2 ▒▒
    computes                ▓ 0 ▓        ▓ 1 ▓        ▓ 2 ▓
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate
from math import prod
from typing import Any

import torch

from motley.backends.cuda.compiling import is_recording
from motley.backends.cuda.kernels.repack import can_repack, repack
from motley.backends.cuda.planes import WeightPlanes, plane_bytes, to_planes
from motley.backends.cuda.values import Values
from motley.errors import PlanError
from motley.formats import PackedTensor
from motley.graph import Tensor

_N_LANES = 2  # streams
_PORTION = 32 << 20  # packed bytes that are copied and repacked together
_REPACKING = 16  # bytes of temporary memory for each byte of a portion
_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable, …ReadOnly

Step = Callable[[Values], None]


def borrowed_bytes(weights: Iterable[Tensor], n_sets: int) -> int:
    """The GPU memory that borrowing takes: sets of planes of the largest matrices, and memory to repack portions."""
    largest: dict[str, int] = {}
    for weight in weights:
        if len(weight.shape) > 1:
            kind = weight.name.rsplit(".", 2)[-2]  # gate, up or down, …
            n_bytes = plane_bytes(weight.dtype, prod(weight.shape[:-1]), weight.shape[-1])
            largest[kind] = max(largest.get(kind, 0), n_bytes)
    return n_sets * sum(largest.values()) + _N_LANES * (1 + _REPACKING) * _PORTION if largest else 0


def copy_seconds(sources: Sequence[torch.Tensor], device: torch.device) -> float | None:
    """How long copying pinned tensors takes. Repacking is left out: it runs meanwhile. None: the device is no GPU."""
    if device.type != "cuda":
        return None
    portion = torch.empty(_PORTION, dtype=torch.uint8, device=device)
    times = []
    for _ in range(3):  # the first time, the driver may map pages
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for source in sources:
            for piece in torch.split(source.reshape(-1), _PORTION):
                portion[: len(piece)].copy_(piece, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


class PinnedPages:
    """Pages of mapped files that a GPU copies without the driver's own buffer. They stay in memory."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._pinned: list[int] = []  # addresses
        self._kept: list[torch.Tensor] = []  # a mapping must not end before its pages are let go
        weakref.finalize(self, _unpin, self._pinned, self._kept)

    def pin(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Pin the pages of tensors in mapped files; False: the system refuses it, or the GPU has no way to do it."""
        if not self._is_gpu:
            return True
        self._kept.extend(tensors)
        for start, stop in page_ranges(tensors):
            error = torch.cuda.cudart().cudaHostRegister(start, stop - start, _READ_ONLY | _PORTABLE)  # type: ignore[no-untyped-call]
            if int(error):
                _unpin(self._pinned, self._kept)
                return False
            self._pinned.append(start)
        return True


def page_ranges(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """The pages of tensors as ranges of addresses, in order. Neighbours may share a page, which is in one range."""
    page = mmap.PAGESIZE
    ranges: list[tuple[int, int]] = []
    for data in sorted(tensors, key=torch.Tensor.data_ptr):
        first = data.data_ptr()
        start, stop = first // page * page, -(-(first + data.numel()) // page) * page
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], stop)
        else:
            ranges.append((start, stop))
    return ranges


def _unpin(addresses: list[int], kept: list[torch.Tensor]) -> None:
    for address in addresses:
        with suppress(Exception):  # at the process's end, the driver may be gone
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
    addresses.clear()
    kept.clear()


class Borrowing:
    """The borrowed matrices of one model on one GPU."""

    def __init__(
        self,
        device: torch.device,
        n_sets: int = 2,
        make_planes: Callable[[PackedTensor, int], WeightPlanes] | None = None,
    ) -> None:
        """`n_sets`: of planes, for the matrices of so many stages. `make_planes`: for so many rows of such a matrix;
        None: memory of their own.
        """
        self._device = device
        self._make_planes = make_planes  # not a method of ours: a cycle would keep the planes' memory
        self.n_sets = n_sets
        self._is_gpu = device.type == "cuda"
        self._sources: dict[str, PackedTensor] = {}
        self._planes: dict[str, WeightPlanes] = {}
        self._sets: dict[tuple[object, ...], WeightPlanes] = {}
        self._joined: dict[tuple[str, ...], WeightPlanes] = {}  # of stages with matrices of one input
        self._set_of: dict[tuple[str, ...], int] = {}  # by the names of a stage's matrices
        self._held: list[tuple[str, ...] | None] = [None] * n_sets  # whose matrices are in each set
        self._lanes: list[Any] = []  # streams
        self._copied: list[list[Any]] = []  # of each set, an event of each lane
        self._computed: list[Any] = []  # of each set: the last kernel that reads it

    def assign(self, names: Sequence[str], sources: Sequence[PackedTensor]) -> None:
        """Choose the set of a stage's matrices: stages that follow each other have different ones."""
        own = tuple(names)
        if own in self._set_of:
            return
        number = self._set_of[own] = len(self._set_of) % self.n_sets
        self._sources |= zip(names, sources, strict=True)
        n_rows = [prod(source.shape[:-1]) for source in sources]
        first = sources[0]
        if len(first.shape) == 2:  # one launch multiplies by all of them
            whole = self._set((number, first.format.name, *n_rows, first.shape[-1]), first, sum(n_rows))
            self._joined[own] = whole
            for name, stop, n in zip(names, accumulate(n_rows), n_rows, strict=True):
                self._planes[name] = whole.rows(stop - n, stop)
            return
        for position, (name, source) in enumerate(zip(names, sources, strict=True)):
            key = number, position, source.format.name, tuple(source.shape)
            self._planes[name] = self._set(key, source, n_rows[position])

    def joined(self, names: tuple[str, ...]) -> WeightPlanes:
        """The matrices of a stage on top of each other."""
        return self._joined[names]

    def planes(self, name: str) -> WeightPlanes:
        """The planes of a matrix when its stage runs. Matrices of other layers use the same memory."""
        return self._planes[name]

    def _set(self, key: tuple[object, ...], source: PackedTensor, n_rows: int) -> WeightPlanes:
        """Planes for such a matrix with `n_rows`, without its values; the same ones for the same key."""
        if key not in self._sets:
            make_planes = self._make_planes or self._empty
            self._sets[key] = make_planes(source, n_rows)
        return self._sets[key]

    def _empty(self, source: PackedTensor, n_rows: int) -> WeightPlanes:
        one = to_planes(PackedTensor(_rows(source)[:1].to(self._device), source.format))

        def like(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part.new_empty((n_rows, *part.shape[1:]))

        codes = like(one.codes)
        assert codes is not None
        return WeightPlanes(one.kind, one.n_columns, codes, like(one.scale), like(one.high))

    def begin(self, stages: Sequence[Sequence[str]]) -> None:
        """Begin to copy the matrices of a batch's first stages. `stages`: the names of each, in their order."""
        if not is_recording():
            self._bring_some([tuple(names) for names in stages[: self.n_sets]], None)

    def around(self, step: Step, names: Sequence[str], following: Sequence[Sequence[str]]) -> Step:
        """The step of a stage with these matrices, copied before it. Those of the `following` stages, in their order,
        are copied as soon as there are free sets.
        """
        own = tuple(names)
        number = self._set_of[own]
        after = [tuple(each) for each in following[: self.n_sets]]

        def run(values: Values) -> None:
            if is_recording():
                self._record_copy(own)
                step(values)
                return
            self._bring(own)
            self._bring_some(after, own)
            self._await(number)
            step(values)
            self._finish(number)
            self._bring_some(after, None)

        return run

    def _bring_some(self, stages: Sequence[tuple[str, ...]], kept: tuple[str, ...] | None) -> None:
        """Begin to copy stages' matrices, up to the first one whose set is taken by a stage before it or by `kept`."""
        taken = set() if kept is None else {self._set_of[kept]}
        for names in stages:
            if self._set_of[names] in taken:
                return
            taken.add(self._set_of[names])
            self._bring(names)

    def _bring(self, names: tuple[str, ...]) -> None:
        """Begin to copy a stage's matrices, unless they are there or on their way."""
        number = self._set_of[names]
        if self._held[number] == names:
            return
        self._held[number] = None
        self._open()
        for lane in self._lanes:
            if self._computed[number] is None:  # the set's memory may have been in use for something else
                lane.wait_stream(torch.cuda.current_stream(self._device))
            else:
                lane.wait_event(self._computed[number])
        turn = 0
        for name in names:
            source, planes = self._sources[name], self._planes[name]
            rows = _rows(source)
            n_at_once = max(1, _PORTION // max(1, rows.shape[1]))
            for start in range(0, len(rows), n_at_once):
                with self._on(turn):
                    self._copy(PackedTensor(rows[start : start + n_at_once], source.format), planes, start)
                turn += 1
        for lane, event in zip(self._lanes, self._copied[number] if self._copied else [], strict=True):
            event.record(lane)
        self._held[number] = names

    def _record_copy(self, names: tuple[str, ...]) -> None:
        """Have the kernels of a copy recorded: one row uses the same as many."""
        for name in names:
            source = self._sources[name]
            if can_repack(source.format.name):
                row = torch.empty((1, source.data.shape[-1]), dtype=torch.uint8, device=self._device)
                repack(row, self._planes[name].rows(0, 1))

    def _copy(self, portion: PackedTensor, planes: WeightPlanes, start: int) -> None:
        there = PackedTensor(portion.data.to(self._device, non_blocking=True), portion.format)
        stop = start + len(portion.data)
        if can_repack(portion.format.name):
            repack(there.data, planes.rows(start, stop))
            return
        made = to_planes(there)
        if made.kind != planes.kind:
            raise PlanError(
                f"{portion.format.name} experts with values beyond float16 cannot be copied for a batch",
                hint="MOTLEY_BORROW_ROWS=0 leaves them to the CPU",
            )
        target = planes.rows(start, stop)
        for old, new in ((target.codes, made.codes), (target.scale, made.scale), (target.high, made.high)):
            if old is not None and new is not None:
                old.copy_(new)

    def _open(self) -> None:
        if self._computed:
            return
        self._computed = [None] * self.n_sets
        if self._is_gpu:
            self._lanes = [torch.cuda.Stream(self._device) for _ in range(_N_LANES)]  # type: ignore[no-untyped-call]
            self._copied = [[_event() for _ in self._lanes] for _ in range(self.n_sets)]

    def _on(self, turn: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._lanes[turn % len(self._lanes)]) if self._lanes else nullcontext()

    def _await(self, number: int) -> None:
        for event in self._copied[number] if self._copied else ():
            torch.cuda.current_stream(self._device).wait_event(event)

    def _finish(self, number: int) -> None:
        """Note that the stage has been launched: the set may be written after it."""
        if self._is_gpu:
            event = self._computed[number] or _event()
            event.record(torch.cuda.current_stream(self._device))
            self._computed[number] = event


def _rows(matrix: PackedTensor) -> torch.Tensor:
    """A matrix with all rows, those of all experts one after the other."""
    return matrix.data if matrix.data.ndim == 2 else matrix.data.flatten(0, 1)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
