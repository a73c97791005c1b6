"""Text from tokens, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class DetokenizerStream:
    """Decodes ids into text as they come. All results, joined, are the decoding of all ids.

    A character may be spread over several tokens. Its bytes wait until it is whole; bytes that can no longer
    become a character are shown as U+FFFD as soon as that is certain, or when the stream ends.
    """

    def __init__(
        self, piece: Callable[[int], bytes], *, drops_space: bool, texts: dict[int, str] | None = None
    ) -> None:
        """`texts`: of tokens that begin and end with whole characters; streams with the same pieces may share it."""
        self._piece = piece
        self._drops_space = drops_space  # of the first piece: the space that encoding put before the text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._texts = {} if texts is None else texts
        self._is_between = (
            not drops_space
        )  # characters: nothing that came before changes the next token's text

    def push(self, token: int) -> str:
        """The text that became certain with this token; often empty in the middle of a character."""
        if self._is_between:
            text = self._texts.get(token)
            if text is not None:
                return text
        data = self._piece(token)
        was_between = self._is_between
        if self._drops_space and data:
            data = data.removeprefix(b" ")
            self._drops_space = False
        text = self._decoder.decode(data)
        self._is_between = not self._drops_space and not self._decoder.getstate()[0]
        if was_between and self._is_between:
            self._texts[token] = text
        return text

    def flush(self) -> str:
        """The end: what was left of an unfinished character."""
        return self._decoder.decode(b"", final=True)
