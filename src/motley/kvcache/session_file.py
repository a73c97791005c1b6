"""A sequence's cache as a file: the same bytes whichever devices held them.

    magic "MOTLEYKV" │ version u32 │ length of the header u32 │ header, JSON │ tokens u32 … │ parts … │ BLAKE2b-256

All little-endian. The parts follow layer by layer, K before V, plane by plane in the order of the type's table, each
(tokens, KV heads, tiles, width) with the heads in the model's order. A sliding-window layer has the tokens from
`firsts[layer]` on, other layers have all. The checksum covers everything before it.

Nothing in a file is trusted: the header has to say what the reader expects of it, the sizes follow from what the reader
knows, and the checksum is verified before any byte is used, and again of the bytes that were.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

from motley.errors import CacheError

MAGIC = b"MOTLEYKV"
VERSION = 1
_FIXED = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_MAX_HEADER = 1 << 16
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Identity:
    """What K/V depend on besides the tokens: a file can be used only if all of this is the same."""

    model: str  # fingerprint
    cache_type_k: str
    cache_type_v: str
    k_rotation: int
    v_rotation: int
    n_layers: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Contents:
    """Which tokens a file has, and from which one on in each layer."""

    tokens: tuple[int, ...]
    firsts: tuple[int, ...]


def write_session(path: Path, identity: Identity, contents: Contents, parts: Iterable[bytes]) -> int:
    """Write a file, whole or not at all, one part at a time; returns its size in bytes.

    It is written beside its place, under a name that was free, and then renamed: no file or link that is already there
    is opened, followed or partly overwritten.
    """
    _require_place(path)
    header = {**asdict(identity), "n_tokens": len(contents.tokens), "firsts": contents.firsts}
    text = json.dumps(header, sort_keys=True).encode()
    front = (_FIXED.pack(MAGIC, VERSION, len(text)), text, _packed(contents.tokens))
    try:
        with NamedTemporaryFile(
            dir=path.parent, prefix=f"{path.name}.", suffix=".part", delete=False
        ) as file:
            try:
                size = _write_with_checksum(file, chain(front, parts))
                os.replace(file.name, path)
            except BaseException:
                with suppress(FileNotFoundError):  # it has its name already
                    os.unlink(file.name)
                raise
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
    return size


def _write_with_checksum(file: IO[bytes], pieces: Iterable[bytes]) -> int:
    checksum = blake2b(digest_size=_DIGEST_BYTES)
    for piece in pieces:
        checksum.update(piece)
        file.write(piece)
    file.write(checksum.digest())
    file.flush()
    return file.tell()


def _require_place(path: Path) -> None:
    """A session may replace a file, but no link, pipe, device or folder."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
    if not stat.S_ISREG(mode):
        raise _unwritable(path, "there is something that is not a regular file")


def _unwritable(path: Path, why: str | None) -> CacheError:
    return CacheError(f"{path}: the session cannot be written: {why}", hint="name another file")


class SessionFile:
    """A file whose checksum and header are valid. Parts are read in the order in which they were written."""

    def __init__(self, path: Path, identity: Identity) -> None:
        """CacheError for a file that is damaged, of another version, or not for this model and cache."""
        self._path = path
        self._file = self._open()
        self._checksum = blake2b(digest_size=_DIGEST_BYTES)  # of what `part` has given
        try:
            self._n_bytes = self._file.seek(0, os.SEEK_END)
            self._file.seek(0)
            n_header = self._read_preamble()
            self._verify_checksum()
            header = self._read_header(n_header)
            self._require_same(header, identity)
            self.contents = self._read_contents(header, identity)
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> IO[bytes]:
        """The file, if it is a regular one: opening a pipe could block."""
        try:
            file = os.fdopen(os.open(self._path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        except OSError as error:
            raise self._unreadable(error) from error
        if not is_file:
            file.close()
            raise CacheError(f"{self._path} is not a saved session: it is not a regular file")
        return file

    def part(self, n_bytes: int) -> bytes:
        """The next part, which has to be there."""
        if n_bytes > self._n_bytes - self._file.tell():  # before memory is taken for it
            raise self._broken("it ends too early")
        data = self._read(n_bytes)
        if len(data) != n_bytes:
            raise self._broken("it was cut while it was read")
        self._checksum.update(data)
        return data

    def require_end(self) -> None:
        """After the last part: only the checksum may be left, and all parts have to be those that it was made of."""
        end = self._read(_DIGEST_BYTES + 1)
        if len(end) > _DIGEST_BYTES:
            raise self._broken("there is more in it than its header says")
        if end != self._checksum.digest():
            raise self._broken("it was changed while it was read")

    def _read(self, n_bytes: int) -> bytes:
        try:
            return self._file.read(n_bytes)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> CacheError:
        return CacheError(f"{self._path}: the session cannot be read: {error.strerror}")

    def close(self) -> None:
        self._file.close()

    def _read_preamble(self) -> int:
        """Reads and checks the preamble. Returns the length of the header."""
        magic, version, n_header = _FIXED.unpack(self.part(_FIXED.size))
        if magic != MAGIC:
            raise CacheError(f"{self._path} is not a saved session")
        if version != VERSION:
            raise CacheError(
                f"{self._path}: a session of version {version}, but this is a program for version {VERSION}",
                hint="save it again with this program",
            )
        if n_header > _MAX_HEADER:
            raise self._broken(f"a header of {n_header} bytes")
        return int(n_header)

    def _verify_checksum(self) -> None:
        here, left = self._file.tell(), self._n_bytes - _DIGEST_BYTES
        self._file.seek(0)
        checksum = blake2b(digest_size=_DIGEST_BYTES)
        while left > 0 and (piece := self._read(min(_CHUNK, left))):
            checksum.update(piece)
            left -= len(piece)
        if self._read(_DIGEST_BYTES) != checksum.digest():
            raise self._broken("the checksum differs")
        self._file.seek(here)

    def _read_header(self, n_bytes: int) -> dict[str, Any]:
        try:
            header = json.loads(self.part(n_bytes))
        except (ValueError, RecursionError):
            raise self._broken("the header is not JSON") from None
        if not isinstance(header, dict):
            raise self._broken("the header is not a JSON object")
        return header

    def _require_same(self, header: dict[str, Any], identity: Identity) -> None:
        for field in fields(identity):
            wanted, found = getattr(identity, field.name), header.get(field.name)
            if found != wanted:
                what = field.name.replace("_", " ")
                raise CacheError(
                    f"{self._path}: saved with {what} {found!r}, but here it is {wanted!r}",
                    hint="load the same model with the same cache types, rotation, n_expert_used and n_layer_exit",
                )

    def _read_contents(self, header: dict[str, Any], identity: Identity) -> Contents:
        n_tokens: Any = header.get("n_tokens")
        firsts: Any = header.get("firsts")
        is_valid = (
            _is_count(n_tokens)
            and n_tokens > 0
            and isinstance(firsts, list)
            and len(firsts) == identity.n_layers
            and all(_is_count(first) and first < n_tokens for first in firsts)
        )
        if not is_valid:
            raise self._broken("the header's counts make no sense")
        tokens = array("I", self.part(4 * n_tokens))
        if sys.byteorder == "big":
            tokens.byteswap()
        return Contents(tuple(tokens), tuple(firsts))

    def _broken(self, why: str) -> CacheError:
        return CacheError(f"{self._path} is damaged: {why}", hint="save the session again")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _packed(tokens: Iterable[int]) -> bytes:
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
