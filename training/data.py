"""Processes that make rows, and the queue that brings them to the trainer.

If the trainer is faster than they are, it gets rows again that it has seen, instead of waiting.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training.drills import Books
from training.mixture import Mixture, Shares
from training.vocabulary import load_tokenizer

MAX_CHUNK = 32_768  # tokens that travel together, at most
Chunk = tuple[int, NDArray[np.int16], NDArray[np.int8]]  # length, ids, kinds, each (rows, length + 1)


def make_chunks(
    prepared: Path, shares: Shares, seed: tuple[int, ...], n_tokens: int, length: Any, chunks: Any
) -> None:
    os.nice(5)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    mixture = Mixture(
        load_tokenizer(prepared / "tokenizer.json"), Books.load(prepared / "books.npz"), seed, shares
    )
    while True:
        n = int(length.value)
        rows = [mixture.row(n + 1) for _ in range(max(1, n_tokens // n))]
        ids, kinds = (np.stack(column) for column in zip(*rows, strict=True))
        chunks.put((n, ids, kinds))


class Feed:
    def __init__(
        self,
        prepared: Path,
        shares: Shares,
        seed: tuple[int, ...],
        length: int,
        n_tokens: int,
        n_workers: int,
    ) -> None:
        """`n_tokens`: of one batch."""
        context = multiprocessing.get_context("fork")
        self._n_tokens, self._chunk = n_tokens, min(MAX_CHUNK, n_tokens)
        self._length = context.Value(ctypes.c_int, length)
        self._chunks: Any = context.Queue(maxsize=4 * n_workers + 8)
        self._seen: deque[Chunk] = deque(maxlen=512)
        self.n_repeated = self.n_fresh = 0
        self._random = random.Random(0)
        for worker in range(n_workers):
            arguments = (prepared, shares, (*seed, worker), self._chunk, self._length, self._chunks)
            context.Process(target=make_chunks, args=arguments, daemon=True).start()

    def take(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and kinds, each (n_tokens / length, length + 1)."""
        if self._length.value != length:
            self._length.value = length
            self._seen.clear()
        parts = [self._take_chunk(length) for _ in range(self._n_tokens // self._chunk)]
        ids, kinds = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
        return torch.from_numpy(ids), torch.from_numpy(kinds)

    def _take_chunk(self, length: int) -> Chunk:
        while True:
            try:
                chunk: Chunk = (
                    self._chunks.get(timeout=300) if len(self._seen) < 64 else self._chunks.get_nowait()
                )
            except queue.Empty:
                self.n_repeated += 1
                return self._random.choice(self._seen)
            if chunk[0] == length:
                self._seen.append(chunk)
                self.n_fresh += 1
                return chunk
