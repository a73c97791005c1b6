"""Weights without contents, for recording a model's kernels before its weights are read.

A kernel's variant depends on the formats and shapes of weights and on the alignment of their addresses, not on their
values. All stand-ins share one range of the device's memory, of the size of the largest plane. It is real memory: where
the library multiplies, it reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from motley.backends.cuda.planes import WeightPlanes, has_planes, stays_plain, to_planes
from motley.backends.cuda.weights import BorrowedMatrix, DeviceMatrix, DeviceWeight, PlaneRef
from motley.errors import DeviceError
from motley.formats import PackedTensor, get_format
from motley.graph import Tensor
from motley.units import show_bytes


class StandIns:
    """The weights of one model on one device."""

    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        """`max_bytes`: of memory that they may take; None: no limit."""
        self._device, self._max_bytes = device, max_bytes
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def weight(self, node: Tensor) -> DeviceWeight:
        """A stand-in of a weight, in the form of `weights.load`. DeviceError: it needs more memory than allowed."""
        shape, form = node.shape, get_format(node.dtype)
        if len(shape) in (2, 3):
            n_rows = shape[0] * shape[1] if len(shape) == 3 else shape[0]
            return DeviceMatrix(PlaneRef(self._planes(node.dtype, n_rows, shape[-1])))
        data = torch.zeros((*shape[:-1], form.row_bytes(shape[-1])), dtype=torch.uint8, device=self._device)
        return PackedTensor(data, form)

    def borrowed(self, node: Tensor) -> BorrowedMatrix:
        """A stand-in of a weight that is copied for each batch: one row of the host's memory stands for all."""
        form = get_format(node.dtype)
        row = torch.zeros(form.row_bytes(node.shape[-1]), dtype=torch.uint8)
        return BorrowedMatrix(PackedTensor(row.expand(*node.shape[:-1], -1), form))

    def borrowed_planes(self, source: PackedTensor, n_rows: int) -> WeightPlanes:
        """Planes for `n_rows` like those of a borrowed matrix."""
        return self._like(_one_row(source.format.name, source.shape[-1]), n_rows)

    def join(self, parts: Sequence[WeightPlanes]) -> WeightPlanes:
        """A joined stand-in, in the form that `planes.join_rows` returns: stand-ins have no contents to copy."""
        first, n_rows = parts[0], sum(part.n_rows for part in parts)
        assert all((p.kind, p.n_columns) == (first.kind, first.n_columns) for p in parts), "unlike matrices"
        return self._like(first, n_rows)

    def _planes(self, form: str, n_rows: int, n_columns: int) -> WeightPlanes:
        if form == "F32" and not stays_plain(form, n_rows, n_columns):
            form = "BF16"
        return self._like(_one_row(form, n_columns), n_rows)

    def _like(self, row: WeightPlanes, n_rows: int) -> WeightPlanes:
        """Planes of `n_rows` rows like those of `row`."""

        def plane(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else self._range(n_rows, part.shape[1], part.dtype)

        codes = plane(row.codes)
        assert codes is not None
        return WeightPlanes(row.kind, row.n_columns, codes, plane(row.scale), plane(row.high))

    def _range(self, n_rows: int, n_values: int, dtype: torch.dtype) -> torch.Tensor:
        n_bytes = n_rows * n_values * dtype.itemsize
        if n_bytes > len(self._memory):
            if self._max_bytes is not None and n_bytes > self._max_bytes:
                raise DeviceError(
                    f"{show_bytes(n_bytes)} for stand-ins, of which {show_bytes(self._max_bytes)} are free"
                )
            self._memory = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
        return self._memory[:n_bytes].view(dtype).view(n_rows, n_values)


@lru_cache(256)
def _one_row(form: str, n_columns: int) -> WeightPlanes:
    """The planes of one row, in the host's memory: their kinds, types and widths are those of all rows."""
    known = get_format(form)
    if not has_planes(form, n_columns) and not stays_plain(form, 1, n_columns):
        return WeightPlanes("BF16", n_columns, torch.zeros(1, n_columns, dtype=torch.int16))
    return to_planes(PackedTensor(torch.zeros(1, known.row_bytes(n_columns), dtype=torch.uint8), known))
