"""Reading forward through a mapped file, never past its end, never allocating more than it can back."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from motley.errors import GGUFError

Number = int | float
Numbers = NDArray[np.number]

_LENGTH = struct.Struct("<Q")
DAMAGED = "the file is truncated or damaged; download it again"


class Cursor:
    """A position in a file. `where` says what is being read, for error messages."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._view = memoryview(data)
        self.path = path
        self.size = len(self._view)  # bytes
        self.position = 0
        self.where = "header"

    def error(self, message: str, *, hint: str | None = None) -> GGUFError:
        return GGUFError(f"{self.path}: {self.where}: {message}", hint=hint)

    def bytes(self, count: int) -> memoryview:
        """The next `count` bytes, not copied."""
        start = self.position
        if count > self.size - start:
            raise self._too_short(start, f"{count:,} bytes")
        self.position = start + count
        return self._view[start : self.position]

    def number(self, code: str) -> Number:
        """One number, by its `struct` code."""
        value: Number = struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))[0]
        return value

    def unsigned(self, code: str) -> int:
        """One unsigned integer, by its `struct` code."""
        return int(self.number(code))

    def count(self, what: str, least_bytes: int) -> int:
        """A count of things that take `least_bytes` or more each: bounded by what is left of the file."""
        count = self.unsigned("Q")
        if count > (self.size - self.position) // least_bytes:
            raise self.error(f"{count:,} {what} cannot fit in a file of {self.size:,} bytes", hint=DAMAGED)
        return count

    def numbers(self, code: str, count: int) -> Numbers:
        """An array of numbers, as a read-only view of the file."""
        dtype = np.dtype("<" + code)
        array = np.frombuffer(self.bytes(count * dtype.itemsize), dtype)
        array.flags.writeable = False
        return array

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> tuple[str, ...]:
        """`count` strings. A vocabulary has hundreds of thousands, so the loop is kept tight."""
        view, size, position = self._view, self.size, self.position
        unpack_length = _LENGTH.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack_length(view, position)[0]
                if position > size:
                    raise self._too_short(start, f"a string of {position - start:,} bytes")
                found.append(str(view[start:position], "utf-8"))
        except struct.error:
            raise self._too_short(position, "the length of a string") from None
        except UnicodeDecodeError as error:
            raise self.error(f"the string at byte {start:,} is not UTF-8 ({error.reason})") from None
        self.position = position
        return tuple(found)

    def _too_short(self, start: int, expected: str) -> GGUFError:
        return self.error(
            f"the file ends at byte {self.size:,}, but {expected} should follow byte {start:,}",
            hint=DAMAGED,
        )
