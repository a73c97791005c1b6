"""Sampling on the device: rows of logits and each row's sampling parameters → token ids. One copy in each direction."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from motley.backends.cuda.kernels import sample as kernels
from motley.backends.cuda.kernels.sample import CAPACITY, CHUNK, CHUNKS_AT_ONCE, EDIT_WORDS, PART, ROW_WORDS

Recent = Mapping[int, Sequence[int]]  # by row: the tokens that its penalties count
Biases = Mapping[int, Mapping[int, float]]  # by row and token

_NONE: Mapping[int, Any] = MappingProxyType({})
_EDITS_AT_ONCE = 128
_BLOCK, _LARGE_BLOCK = (
    1024,
    4096,
)  # candidates that a program reads at a time; the second with few numbers for each


@dataclass(frozen=True)
class RowSettings:
    """Sampling parameters of a request. The field names are those of `motley.engine.SamplingParams`."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    key: int = 0  # 64-bit key of the request's random numbers

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
        return kernels.BY_DRAWS if has_top_p else kernels.UNFILTERED

    @cached_property
    def _packed(self) -> dict[int, bytes]:
        return {}

    def words(self, n_vocab: int) -> bytes:
        """ROW_WORDS words as the kernels read them, without the token's index. Packed once for all tokens."""
        if n_vocab not in self._packed:
            words = np.zeros(ROW_WORDS, np.uint32)
            words.view(np.float32)[:7] = (
                self.temperature, self.top_p, math.log(self.min_p) if self.min_p > 0 else -math.inf,
                self.typical_p, self.repeat, self.frequency, self.presence,
            )  # fmt: skip
            words[7] = self.top_k if self.top_k < n_vocab else 0
            words[8], words[9], words[11] = self.key & 0xFFFFFFFF, self.key >> 32, self.mode(n_vocab)
            self._packed[n_vocab] = words.tobytes()
        return self._packed[n_vocab]


class DeviceSampler:
    """Samples tokens on the device of the logits. One batch at a time: read `Pending.ids` before the next `launch`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._copied: torch.cuda.Event | None = None
        self._n_rows = self._n_chunks = 0
        self._has_filters = False  # whether a row of the last batch has any
        self._allocate_numbers(1024)

    def launch(
        self,
        logits: torch.Tensor,
        settings: Sequence[RowSettings],
        indexes: Sequence[int],
        recent: Recent = _NONE,
        biases: Biases = _NONE,
    ) -> Pending:
        """Start sampling a token for each row of `logits` (rows, vocab) float32.

        `indexes`: of the rows' tokens in their answers. `recent` and `biases`: of rows that have any; they change their
        logits.
        """
        edits = _edits(recent, biases)
        with torch.cuda.device(self._device) if self._is_gpu else nullcontext():  # for kernel launches
            return self._launch(logits, settings, indexes, edits)

    def _launch(
        self,
        logits: torch.Tensor,
        settings: Sequence[RowSettings],
        indexes: Sequence[int],
        given: npt.NDArray[np.int32],
    ) -> Pending:
        assert logits.shape[0] == len(settings) == len(indexes)
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        n_rows, n_vocab = logits.shape
        n_chunks, n_parts = triton.cdiv(n_vocab, CHUNK), triton.cdiv(n_vocab, PART)
        chunks = triton.next_power_of_2(n_chunks)
        n_edits = len(given)
        self._stage(settings, indexes, given, n_vocab)
        self._make_room(n_rows, n_chunks, n_parts)
        rows, edits = self._there, self._there[n_rows * ROW_WORDS :]
        if n_edits:
            kernels._edit[(triton.cdiv(n_edits, _EDITS_AT_ONCE),)](
                logits, logits.stride(0), rows, edits, n_edits, N=_EDITS_AT_ONCE, num_warps=1
            )
        kernels._survey[(n_rows, triton.cdiv(n_chunks, CHUNKS_AT_ONCE))](
            logits, logits.stride(0), n_vocab, rows,
            self._peaks, self._masses, self._scores, self._chunk_ids, n_chunks,
            CHUNK=CHUNK, N=CHUNKS_AT_ONCE, num_warps=4,
        )  # fmt: skip
        if self._has_filters:
            kernels._collect[(n_rows, n_parts)](
                logits, logits.stride(0), n_vocab, rows, self._peaks, n_chunks,
                self._values, self._value_ids, self._counts,
                CHUNK=CHUNK, CHUNKS=chunks, PART=PART, CAPACITY=CAPACITY, BLOCK=_BLOCK, num_warps=4,
            )  # fmt: skip
        kernels._choose[(n_rows,)](
            logits, logits.stride(0), n_vocab, rows,
            self._peaks, self._masses, self._scores, self._chunk_ids, n_chunks,
            self._values, self._value_ids, self._counts, n_parts, self._chosen,
            CHUNKS=chunks, PARTS=triton.next_power_of_2(n_parts), CAPACITY=CAPACITY, BLOCK=_BLOCK,
            LARGE=_LARGE_BLOCK, num_warps=8,
        )  # fmt: skip
        self._chosen_here[:n_rows].copy_(self._chosen[:n_rows], non_blocking=True)
        if self._is_gpu:
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return Pending(self._chosen_here[:n_rows], self._copied)

    def chosen(self, n_rows: int) -> torch.Tensor:
        """The last batch's ids on the device, int32. The next batch can use them without a copy to the host."""
        return self._chosen[:n_rows]

    def _stage(
        self,
        settings: Sequence[RowSettings],
        indexes: Sequence[int],
        edits: npt.NDArray[np.int32],
        n_vocab: int,
    ) -> None:
        """Copy all rows' parameters and edits to the device."""
        n_rows = len(settings)
        n_words = ROW_WORDS * n_rows + edits.size
        if n_words > len(self._here):
            self._allocate_numbers(2 * n_words)
        if self._copied is not None:
            self._copied.synchronize()  # the last batch's copy from pinned memory is complete
        words: npt.NDArray[np.int32] = self._here.numpy()
        packed = b"".join([wanted.words(n_vocab) for wanted in settings])
        rows = words[: ROW_WORDS * n_rows].reshape(-1, ROW_WORDS)
        rows[:] = np.frombuffer(packed, np.int32).reshape(-1, ROW_WORDS)
        rows.view(np.uint32)[:, 10] = [index & 0xFFFFFFFF for index in indexes]
        self._has_filters = bool((rows[:, 11] > kernels.BY_DRAWS).any())
        words[ROW_WORDS * n_rows : n_words] = edits.ravel()
        self._there[:n_words].copy_(self._here[:n_words], non_blocking=True)

    def _allocate_numbers(self, n_words: int) -> None:
        self._here = torch.zeros(n_words, dtype=torch.int32, pin_memory=self._is_gpu)
        self._there = torch.zeros(n_words, dtype=torch.int32, device=self._device)

    def _make_room(self, n_rows: int, n_chunks: int, n_parts: int) -> None:
        """Allocate the kernels' output buffers, for the largest batch so far."""
        if n_rows <= self._n_rows and n_chunks <= self._n_chunks:
            return
        self._n_rows, self._n_chunks = max(n_rows, self._n_rows), max(n_chunks, self._n_chunks)
        n_parts = max(n_parts, triton.cdiv(self._n_chunks * CHUNK, PART))
        size = self._n_rows * self._n_chunks
        self._peaks, self._masses, self._scores = (torch.empty(size, device=self._device) for _ in range(3))
        self._chunk_ids = torch.empty(size, dtype=torch.int32, device=self._device)
        n_places = self._n_rows * n_parts
        self._values = torch.empty(n_places * CAPACITY, device=self._device)
        self._value_ids = torch.empty(n_places * CAPACITY, dtype=torch.int32, device=self._device)
        self._counts = torch.empty(n_places, dtype=torch.int32, device=self._device)
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


def _edits(recent: Recent, biases: Biases) -> npt.NDArray[np.int32]:
    """(edits, EDIT_WORDS): a row, one of its tokens, how often penalties count it, and its bias as float32.

    By arrays of all rows: with 128 rows, dictionaries of each take half as long as a step.
    """
    counted = _keys(recent)
    if not biases:
        keys, counts = np.unique(counted, return_counts=True)
    else:
        keys, places = np.unique(np.concatenate([counted, _keys(biases)]), return_inverse=True)
        counts = np.bincount(places[: len(counted)], minlength=len(keys))
    words = np.zeros((len(keys), EDIT_WORDS), np.int32)
    words[:, 0], words[:, 1], words[:, 2] = keys >> 32, keys & 0xFFFFFFFF, counts
    if biases:
        values = chain.from_iterable(own.values() for own in biases.values())
        words.view(np.float32)[places[len(counted) :], 3] = list(values)
    return words


def _keys(tokens: Mapping[int, Collection[int]]) -> npt.NDArray[np.int64]:
    """row · 2³² + token, of all rows' tokens."""
    sizes = [len(own) for own in tokens.values()]
    rows = np.repeat(np.fromiter(tokens, np.int64, len(tokens)), sizes)
    return (rows << 32) + np.fromiter(chain.from_iterable(tokens.values()), np.int64, sum(sizes))
