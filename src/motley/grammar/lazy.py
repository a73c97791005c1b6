"""A grammar that begins to hold when a trigger has been generated: free text, then for example a tool call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from functools import cached_property
from typing import Any

import numpy as np

from motley.errors import RequestError
from motley.grammar.matcher import EagerMatcher, Words


class Triggers:
    """The triggers of a compiled grammar over a vocabulary, shared by all its answers.

    A token may complete a trigger and continue: after "<tool_call", the token ">{" does. If the grammar refuses the
    continuation, the token is forbidden in that place. All other tokens are free.
    """

    def __init__(
        self,
        triggers: Sequence[str],
        base: Any,
        pieces: Sequence[bytes],
        control_ids: Set[int],
    ) -> None:
        """`base`: llguidance's matcher at the beginning of the grammar. `pieces`: the bytes of each token."""
        self.texts = tuple(trigger.encode() for trigger in triggers)
        self.pieces = pieces
        self.control_ids = control_ids
        self.n_longest = max(map(len, self.texts))
        self._base = base
        self._id_of = {piece: i for i, piece in enumerate(pieces) if piece and i not in control_ids}
        self._n_longest_piece = max(map(len, self._id_of), default=0)
        self._forbidden: dict[tuple[bytes, int], list[int]] = {}  # by trigger and how much of it is there
        for text in self.texts:
            self._require_start(text)
            for n_there in range(len(text)):  # now, as this takes longer than a token should
                self._forbidden_after(text, n_there)

    def started(self, text: bytes) -> EagerMatcher | None:
        """A matcher that has read `text`, which begins with a trigger; None if the grammar refuses the text."""
        tokens = self._cut(text)
        if tokens is None:
            return None
        inner = self._base.deep_copy()
        return EagerMatcher(inner) if inner.try_consume_tokens(tokens) == len(tokens) else None

    def started_by(self, token: int) -> EagerMatcher | None:
        """A matcher that has read a control token, as a token or, if the grammar has it as text, as its text."""
        inner = self._base.deep_copy()
        if inner.try_consume_tokens([token]) == 1:
            return EagerMatcher(inner)
        return self.started(self.pieces[token])

    def forbidden(self, tail: bytes) -> list[int]:
        """Tokens that would complete a trigger after `tail` and continue in a way that the grammar refuses."""
        found: list[int] = []
        for text in self.texts:
            for n_there in range(min(len(text) - 1, len(tail)) + 1):
                if tail.endswith(text[:n_there]):
                    found += self._forbidden_after(text, n_there)
        return found

    def _require_start(self, text: bytes) -> None:
        as_tokens = [i for i in self.control_ids if self.pieces[i] == text]
        if self.started(text) is None and not any(map(self.started_by, as_tokens)):
            raise RequestError(
                f"the grammar does not begin with the trigger {text.decode()!r}",
                hint="the grammar holds from the first character of the trigger on",
            )

    def _forbidden_after(self, text: bytes, n_there: int) -> list[int]:
        key = text, n_there
        if key not in self._forbidden:
            rest = text[n_there:]
            ids = self._with_prefix(rest) if n_there else self._containing(text)
            self._forbidden[key] = [i for i in ids if not self._continues(text, rest, self.pieces[i])]
        return self._forbidden[key]

    def _continues(self, text: bytes, rest: bytes, piece: bytes) -> bool:
        beyond = piece[piece.index(rest) + len(rest) :]
        return self.started(text + beyond) is not None

    def _containing(self, text: bytes) -> list[int]:
        return [i for i, piece in enumerate(self.pieces) if text in piece and i not in self.control_ids]

    def _with_prefix(self, start: bytes) -> list[int]:
        order, sorted_pieces = self._sorted
        ids = []
        for at in range(bisect_left(sorted_pieces, start), len(order)):
            if not sorted_pieces[at].startswith(start):
                break
            ids.append(order[at])
        return [i for i in ids if i not in self.control_ids]

    @cached_property
    def _sorted(self) -> tuple[list[int], list[bytes]]:
        order = sorted(range(len(self.pieces)), key=self.pieces.__getitem__)
        return order, [self.pieces[i] for i in order]

    def _cut(self, text: bytes) -> list[int] | None:
        """Tokens with these bytes, the longest first. The grammar only reads their bytes. None: there are none."""
        tokens = []
        while text:
            lengths = range(min(self._n_longest_piece, len(text)), 0, -1)
            found = next((n for n in lengths if text[:n] in self._id_of), 0)
            if not found:
                return None
            tokens.append(self._id_of[text[:found]])
            text = text[found:]
        return tokens


class LazyMatcher:
    """Free until a trigger has been generated, then bound by the grammar. See `Matcher`."""

    def __init__(self, triggers: Triggers) -> None:
        self._triggers = triggers
        self._tail = b""  # the end of the answer, where a trigger may have begun
        self._bound: EagerMatcher | None = None

    def mask(self) -> Words | None:
        """See Matcher."""
        if self._bound is not None:
            return self._bound.mask()
        forbidden = self._triggers.forbidden(self._tail)
        if not forbidden:
            return None
        free = np.full(-(-len(self._triggers.pieces) // 32) * 32, True)
        free[forbidden] = False
        return np.packbits(free, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        """See Matcher."""
        if self._bound is not None:
            self._bound.accept(token)
            return
        triggers = self._triggers
        if token in triggers.control_ids:
            self._tail = b""
            if triggers.pieces[token] in triggers.texts:
                self._bound = triggers.started_by(token)
            return
        text = self._tail + triggers.pieces[token]
        found = [(at, -len(trigger)) for trigger in triggers.texts if (at := text.find(trigger)) >= 0]
        if found:
            self._bound = triggers.started(text[min(found)[0] :])
        self._tail = text[max(0, len(text) - triggers.n_longest + 1) :]

    def forced(self) -> list[int]:
        """See Matcher."""
        return [] if self._bound is None else self._bound.forced()

    @property
    def is_complete(self) -> bool:
        """See Matcher."""
        return self._bound is not None and self._bound.is_complete
