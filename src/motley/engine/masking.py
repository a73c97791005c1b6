"""Forbids tokens in rows of logits, before anything is chosen from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from motley.grammar import Matcher, Words
from motley.grammar.matcher import allowed

_FORBIDDEN = float("-inf")


class Masked(Protocol):
    """A row's constraint and the tokens that it may not have yet."""

    @property
    def matcher(self) -> Matcher | None: ...
    @property
    def banned(self) -> frozenset[int]: ...


def mask_rows(logits: torch.Tensor, rows: Sequence[Masked]) -> dict[int, BaseException]:
    """Sets the logits of forbidden tokens to -inf, in place. Returns the errors of rows whose matcher failed.

    A GPU still computes the logits while the masks are made here.
    """
    faults: dict[int, BaseException] = {}
    masks: dict[int, Words] = {}
    for i, row in enumerate(rows):
        try:
            words = None if row.matcher is None else row.matcher.mask()
        except BaseException as error:  # of this request only
            faults[i] = error
            continue
        if words is not None:
            masks[i] = _without(words, row.banned)
        elif row.banned:
            logits[i, sorted(row.banned)] = _FORBIDDEN
    if masks:
        _apply(logits, masks)
    return faults


def _without(words: Words, banned: frozenset[int]) -> Words:
    """The mask without `banned`; the same mask if nothing else would be left."""
    if not banned:
        return words
    kept = words.copy()
    for token in banned:
        kept[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
    return kept if kept.any() else words


def _apply(logits: torch.Tensor, masks: dict[int, Words]) -> None:
    n_vocab = logits.shape[1]
    if logits.device.type == "cpu":
        for row, words in masks.items():
            logits[row].masked_fill_(torch.from_numpy(~allowed(words, n_vocab)), _FORBIDDEN)
        return
    rows = torch.tensor(list(masks), device=logits.device)
    bits = torch.from_numpy(np.stack(list(masks.values()))).to(logits.device)  # (rows, words)
    logits.index_copy_(0, rows, masked(logits[rows], bits))


def masked(rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """The rows (rows, vocab) with -inf where a bit of `words` (rows, vocab / 32) is 0, on any device."""
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    is_allowed = bits.flatten(1)[:, : rows.shape[1]].bool()
    n_beyond = rows.shape[1] - is_allowed.shape[1]  # tokens of the model without a place in the vocabulary
    is_allowed = torch.nn.functional.pad(is_allowed, (0, n_beyond)) if n_beyond else is_allowed
    return rows.masked_fill(~is_allowed, _FORBIDDEN)
