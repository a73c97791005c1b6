"""`Matcher`: where one answer is in its grammar."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from motley.errors import RequestError
from motley.grammar.constraint import shortened

Words = npt.NDArray[np.int32]  # a bit for each token, the lowest first; set: allowed


class Matcher(Protocol):
    """One answer's state. It advances by the tokens of the answer; used by one thread at a time."""

    def mask(self) -> Words | None:
        """The tokens that may come next; None: all. An end token is among them exactly if the grammar is fulfilled."""
        ...

    def accept(self, token: int) -> None:
        """Advances by a token that the mask allows. RequestError if the grammar refuses it."""
        ...

    def forced(self) -> list[int]:
        """The usual tokens of the text that must come next, if there is only one; they are no part of the state."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the grammar is fulfilled and nothing can follow."""
        ...


class EagerMatcher:
    """The grammar holds from the first token on. Wraps llguidance's matcher, whose errors are states."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._mask: Words | None = None  # of the present state, once computed

    def mask(self) -> Words:
        """See Matcher."""
        if self._mask is None:
            words = np.frombuffer(self._inner.compute_bitmask(), dtype=np.int32)
            self._require_sound()
            self._mask = words
        return self._mask

    def accept(self, token: int) -> None:
        """See Matcher."""
        self._mask = None
        self._inner.consume_token(token)
        self._require_sound()

    def forced(self) -> list[int]:
        """See Matcher."""
        tokens: list[int] = self._inner.compute_ff_tokens()
        return tokens

    @property
    def is_complete(self) -> bool:
        """See Matcher."""
        return bool(self._inner.is_stopped()) and bool(self._inner.is_accepting())

    def _require_sound(self) -> None:
        if self._inner.is_error():
            raise RequestError(
                f"the grammar cannot continue this answer: {shortened(self._inner.get_error())}",
                hint="simplify the grammar",
            )


def allowed_ids(mask: bytes | Words, n_vocab: int) -> npt.NDArray[np.int64]:
    """The ids of a mask's set bits."""
    found: npt.NDArray[np.int64] = allowed(mask, n_vocab).nonzero()[0]
    return found


def allowed(mask: bytes | Words, n_vocab: int) -> npt.NDArray[np.bool_]:
    """A mask as one bool for each of the model's tokens; those beyond the vocabulary are not allowed."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[:n_vocab]
    whole = np.zeros(n_vocab, dtype=np.bool_)
    whole[: len(bits)] = bits
    return whole
