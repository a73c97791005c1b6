"""SentencePiece-style BPE (`tokenizer.ggml.model` = llama).

Of all neighbours that join to a token, the pair with the best score is joined first, the leftmost among
equals, until nothing joins. GGUF has no list of merges for these vocabularies, only scores, and scores can be
equal: a ranked list of pairs, which the BPE of the `tokenizers` library wants, cannot say that position decides.
So the loop is written out. It stays fast because text is first cut between characters that stand side by side
in no token, which no merge can bridge, and the segments are cached.
"""

from __future__ import annotations

import re
from functools import lru_cache
from heapq import heapify, heappop, heappush

from motley.errors import TokenizerError
from motley.text.vocab import PREFIX, TokenType, Vocabulary

SPACE = "\u2581"  # how these vocabularies write a space
# Segments whose ids are kept: so many, of so many characters. Together they bound the memory.
N_CACHED_SEGMENTS = 1 << 16
MAX_CACHED_LENGTH = 64


class SentencePieceEncoder:
    """Text without special tokens → ids, and ids → bytes."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._ids: dict[str, int] = {}
        for i in vocab.ids_of(TokenType.NORMAL):
            self._ids.setdefault(vocab.tokens[i], i)
        self._costs = {text: -vocab.scores[i] for text, i in self._ids.items()}
        self._neighbours = {text[i : i + 2] for text in self._ids for i in range(len(text) - 1)}
        self._id_of_byte = {byte: i for i, byte in vocab.byte_of.items()}
        if len(self._id_of_byte) < 256 and vocab.unknown_id is None:
            raise TokenizerError(
                f"{PREFIX}tokens has {len(self._id_of_byte)} of 256 byte tokens, and no unknown token",
                hint=f"set {PREFIX}unknown_token_id",
            )
        self._cached_ids = lru_cache(N_CACHED_SEGMENTS)(self._merge)

    def encode(self, text: str) -> list[int]:
        if self._vocab.remove_extra_whitespaces:
            text = re.sub(" +", " ", text).strip(" ")
        if text and self._vocab.add_space_prefix:
            text = " " + text
        ids: list[int] = []
        for segment in self._segments(text.replace(" ", SPACE)):
            ids_of = self._cached_ids if len(segment) <= MAX_CACHED_LENGTH else self._merge
            ids.extend(ids_of(segment))
        return self._fuse_unknown(ids)

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        if (byte := self._vocab.byte_of.get(token)) is not None:
            return bytes((byte,))
        text = self._vocab.tokens[token]
        is_literal = self._vocab.types[token] not in (TokenType.NORMAL, TokenType.UNUSED)
        return (text if is_literal else text.replace(SPACE, " ")).encode()

    def _segments(self, text: str) -> list[str]:
        cuts = [i + 1 for i in range(len(text) - 1) if text[i : i + 2] not in self._neighbours]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def _merge(self, segment: str) -> tuple[int, ...]:
        parts = list(segment)  # parts[i] starts at character i; empty once joined to a part on its left
        n = len(parts)
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))
        costs = self._costs
        queue = [(costs[s], i, s) for i in range(n - 1) if (s := segment[i : i + 2]) in costs]
        heapify(queue)
        while queue:
            _, left, joined = heappop(queue)
            right = after[left]
            if not parts[left] or right == n or parts[left] + parts[right] != joined:
                continue  # a neighbour has changed since this pair was queued
            parts[left], parts[right] = joined, ""
            after[left] = after[right]
            if after[left] < n:
                before[after[left]] = left
                if (s := joined + parts[after[left]]) in costs:
                    heappush(queue, (costs[s], left, s))
            if before[left] >= 0 and (s := parts[before[left]] + joined) in costs:
                heappush(queue, (costs[s], before[left], s))
        return tuple(i for part in parts if part for i in self._spell(part))

    def _spell(self, part: str) -> tuple[int, ...]:
        """A token, or what is written for a character that is none: its bytes, or else the unknown token."""
        if (token := self._ids.get(part)) is not None:
            return (token,)
        data = part.encode()
        if self._vocab.unknown_id is not None and any(byte not in self._id_of_byte for byte in data):
            return (self._vocab.unknown_id,)
        return tuple(self._id_of_byte[byte] for byte in data)

    def _fuse_unknown(self, ids: list[int]) -> list[int]:
        """A run of unknown characters is one unknown token."""
        unknown = self._vocab.unknown_id
        if unknown is None or unknown not in ids:
            return ids
        return [i for n, i in enumerate(ids) if i != unknown or n == 0 or ids[n - 1] != unknown]
