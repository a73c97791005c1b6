"""Sampling on the device: rows of logits and each row's sampling parameters → token ids. One copy in each direction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import triton

from motley.backends.cuda.kernels import sample as kernels
from motley.backends.cuda.kernels.sample import CAPACITY, CHUNK, CHUNKS_AT_ONCE, EDIT_WORDS, ROW_WORDS

Edits = Mapping[int, tuple[int, float]]  # by token: its count in the penalty window, and its bias

_EDITS_AT_ONCE = 128
_BLOCK = 1024  # candidates that a program reads at a time


@dataclass(frozen=True)
class RowSettings:
    """Sampling parameters of one row. The field names are those of `motley.engine.SamplingParams`."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    key: int = 0  # 64-bit key of the request's random numbers
    index: int = 0  # position of the token in its answer
    edits: Edits = field(default_factory=dict)

    def mode(self, n_vocab: int) -> int:
        """How `kernels.sample` finds this row's candidates."""
        n_chunks, has_top_k = triton.cdiv(n_vocab, CHUNK), 0 < self.top_k < n_vocab
        is_typical, has_top_p = self.typical_p < 1, self.top_p < 1
        if self.temperature == 0:
            return kernels.GREEDY
        if has_top_k and self.top_k <= n_chunks:
            return kernels.BY_PEAKS
        if is_typical or (has_top_k and (has_top_p or self.min_p == 0)):
            return kernels.WHOLE_ROW
        if self.min_p > 0:
            return kernels.BY_MIN_P
        return kernels.BY_GUESS if has_top_p else kernels.UNFILTERED


class DeviceSampler:
    """Samples tokens on the device of the logits. One batch at a time: read `Pending.ids` before the next `launch`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._copied: torch.cuda.Event | None = None
        self._n_rows = self._n_chunks = 0
        self._allocate_numbers(1024)

    def launch(self, logits: torch.Tensor, settings: Sequence[RowSettings]) -> Pending:
        """Start sampling a token for each row of `logits` (rows, vocab) float32. Edits change the logits in place."""
        with torch.cuda.device(self._device) if self._is_gpu else nullcontext():  # for kernel launches
            return self._launch(logits, settings)

    def _launch(self, logits: torch.Tensor, settings: Sequence[RowSettings]) -> Pending:
        assert logits.shape[0] == len(settings)
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        n_rows, n_vocab = logits.shape
        n_edits = self._stage(settings, n_vocab)
        self._make_room(n_rows, triton.cdiv(n_vocab, CHUNK))
        rows, edits = self._there, self._there[n_rows * ROW_WORDS :]
        if n_edits:
            kernels._edit[(triton.cdiv(n_edits, _EDITS_AT_ONCE),)](
                logits, logits.stride(0), rows, edits, n_edits, N=_EDITS_AT_ONCE, num_warps=1
            )
        n_chunks = triton.cdiv(n_vocab, CHUNK)
        kernels._survey[(n_rows, triton.cdiv(n_chunks, CHUNKS_AT_ONCE))](
            logits, logits.stride(0), n_vocab, rows,
            self._peaks, self._masses, self._scores, self._chunk_ids, n_chunks,
            CHUNK=CHUNK, N=CHUNKS_AT_ONCE, num_warps=4,
        )  # fmt: skip
        kernels._choose[(n_rows,)](
            logits, logits.stride(0), n_vocab, rows,
            self._peaks, self._masses, self._scores, self._chunk_ids, n_chunks,
            self._values, self._value_ids, self._chosen,
            CHUNK=CHUNK, CHUNKS=triton.next_power_of_2(n_chunks), CAPACITY=CAPACITY, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        self._chosen_here[:n_rows].copy_(self._chosen[:n_rows], non_blocking=True)
        if self._is_gpu:
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return Pending(self._chosen_here[:n_rows], self._copied)

    def chosen(self, n_rows: int) -> torch.Tensor:
        """The last batch's ids on the device, int32. The next batch can use them without a copy to the host."""
        return self._chosen[:n_rows]

    def _stage(self, settings: Sequence[RowSettings], n_vocab: int) -> int:
        """Copy all rows' parameters and edits to the device. Returns the number of edits."""
        n_edits = sum(len(wanted.edits) for wanted in settings)
        n_words = ROW_WORDS * len(settings) + EDIT_WORDS * n_edits
        if n_words > len(self._here):
            self._allocate_numbers(2 * n_words)
        if self._copied is not None:
            self._copied.synchronize()  # the last batch's copy from pinned memory is complete
        words: npt.NDArray[np.int32] = self._here.numpy()
        _write_rows(words[: ROW_WORDS * len(settings)].reshape(-1, ROW_WORDS), settings, n_vocab)
        if n_edits:
            _write_edits(words[ROW_WORDS * len(settings) : n_words].reshape(-1, EDIT_WORDS), settings)
        self._there[:n_words].copy_(self._here[:n_words], non_blocking=True)
        return n_edits

    def _allocate_numbers(self, n_words: int) -> None:
        self._here = torch.zeros(n_words, dtype=torch.int32, pin_memory=self._is_gpu)
        self._there = torch.zeros(n_words, dtype=torch.int32, device=self._device)

    def _make_room(self, n_rows: int, n_chunks: int) -> None:
        """Allocate the kernels' output buffers, for the largest batch so far."""
        if n_rows <= self._n_rows and n_chunks <= self._n_chunks:
            return
        self._n_rows, self._n_chunks = max(n_rows, self._n_rows), max(n_chunks, self._n_chunks)
        size = self._n_rows * self._n_chunks
        self._peaks, self._masses, self._scores = (torch.empty(size, device=self._device) for _ in range(3))
        self._chunk_ids = torch.empty(size, dtype=torch.int32, device=self._device)
        self._values = torch.empty(self._n_rows * CAPACITY, device=self._device)
        self._value_ids = torch.empty(self._n_rows * CAPACITY, dtype=torch.int32, device=self._device)
        self._chosen = torch.empty(self._n_rows, dtype=torch.int32, device=self._device)
        self._chosen_here = torch.empty(self._n_rows, dtype=torch.int32, pin_memory=self._is_gpu)


@dataclass(frozen=True, eq=False)
class Pending:
    """Token ids whose copy to the host is in progress."""

    _ids: torch.Tensor  # int32 (rows,), in host memory
    _copied: torch.cuda.Event | None

    def ids(self) -> list[int]:
        """The ids; waits for the copy. In place of an id there may be `kernels.sample.NONE_LEFT` or `NOT_FINITE`."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._ids.tolist()


def _write_rows(words: npt.NDArray[np.int32], settings: Sequence[RowSettings], n_vocab: int) -> None:
    numbers = words.view(np.float32)
    for row, wanted in enumerate(settings):
        numbers[row, :7] = (
            wanted.temperature, wanted.top_p, math.log(wanted.min_p) if wanted.min_p > 0 else -math.inf,
            wanted.typical_p, wanted.repeat, wanted.frequency, wanted.presence,
        )  # fmt: skip
        low, high = wanted.key & 0xFFFFFFFF, wanted.key >> 32
        words.view(np.uint32)[row, 7:12] = (
            wanted.top_k if wanted.top_k < n_vocab else 0, low, high, wanted.index & 0xFFFFFFFF, wanted.mode(n_vocab)
        )  # fmt: skip


def _write_edits(words: npt.NDArray[np.int32], settings: Sequence[RowSettings]) -> None:
    start = 0
    for row, wanted in enumerate(settings):
        stop = start + len(wanted.edits)
        words[start:stop, 0] = row
        words[start:stop, 1] = list(wanted.edits)
        words[start:stop, 2] = [count for count, _ in wanted.edits.values()]
        words.view(np.float32)[start:stop, 3] = [bias for _, bias in wanted.edits.values()]
        start = stop
