"""Text from tokens, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class DetokenizerStream:
    """Turns ids into text as they come; what it returns over its life, joined, is the decoding of all ids.

    A character may be spread over several tokens. Its bytes wait until it is whole; bytes that can no longer
    become a character are shown as U+FFFD as soon as that is certain, or when the stream ends.
    """

    def __init__(self, piece: Callable[[int], bytes], *, drops_space: bool) -> None:
        self._piece = piece
        self._drops_space = drops_space  # of the first piece: the space that encoding put before the text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became certain with this token; often empty in the middle of a character."""
        data = self._piece(token)
        if self._drops_space and data:
            data = data.removeprefix(b" ")
            self._drops_space = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end: what was left of an unfinished character."""
        return self._decoder.decode(b"", final=True)
