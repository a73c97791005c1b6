"""Perplexity as llama.cpp measures it, so that figures can be compared.

The text is cut into chunks of n_ctx tokens that do not overlap; an incomplete last chunk is dropped. Each chunk is
read from an empty cache, with its first token replaced by the beginning-of-text token if the vocabulary requires
one. The first half of a chunk is only context; the second half is scored: position i, for n_ctx/2 <= i < n_ctx-1,
predicts token i+1.

    perplexity = exp(mean(nll))     error = perplexity * std(nll) / sqrt(count - 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from motley.errors import RequestError
from motley.text import Tokenizer


@dataclass(frozen=True)
class Score:
    """Sums over the tokens scored so far; `+` adds the scores of more tokens."""

    nll: float = 0.0  # negative log likelihood, in nats
    nll_squared: float = 0.0
    count: int = 0

    def __add__(self, nll: npt.NDArray[np.float64]) -> Score:
        return Score(
            self.nll + float(nll.sum()), self.nll_squared + float((nll**2).sum()), self.count + nll.size
        )

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.count)

    @property
    def error(self) -> float:
        """One standard error of the perplexity."""
        mean = self.nll / self.count
        variance = max(self.nll_squared / self.count - mean**2, 0.0)
        return self.perplexity * math.sqrt(variance / max(self.count - 1, 1))


def read_chunks(
    tokenizer: Tokenizer, text: str, n_ctx: int, max_chunks: int | None = None
) -> list[list[int]]:
    """The first chunks of a text, as token ids."""
    tokens = tokenizer.encode(text, parse_special=False)
    bos_id = tokenizer.bos_id if tokenizer.adds_bos else None
    return list(islice(split_chunks(tokens, n_ctx, bos_id), max_chunks))


def split_chunks(tokens: Sequence[int], n_ctx: int, bos_id: int | None) -> Iterator[list[int]]:
    """Chunks of exactly `n_ctx` tokens; `bos_id` None: leave their first token as it is."""
    if n_ctx < 4:
        raise RequestError(
            f"a context of {n_ctx} tokens leaves nothing to score", hint="-c must be at least 4"
        )
    if len(tokens) < n_ctx:
        raise RequestError(
            f"the text has {len(tokens)} tokens, less than one context of {n_ctx}",
            hint="give a longer text or a smaller -c",
        )
    for start in range(0, len(tokens) - n_ctx + 1, n_ctx):
        chunk = list(tokens[start : start + n_ctx])
        yield chunk if bos_id is None else [bos_id, *chunk[1:]]


def scored_rows(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The rows of a chunk's logits (tokens, vocab) that predict a scored token: from the middle to the last but one."""
    return logits[len(logits) // 2 : -1]


def second_half_nll(logits: npt.NDArray[np.float32], tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """-log p of each token after the middle of a chunk; `logits`: (tokens, vocab)."""
    rows = scored_rows(logits)  # (scored, vocab)
    best = rows.max(axis=1)
    log_total = np.log(np.exp(rows - best[:, None]).sum(axis=1, dtype=np.float64)) + best
    chosen = rows[np.arange(len(rows)), np.asarray(tokens[-len(rows) :])]
    return np.asarray(log_total - chosen, dtype=np.float64)
