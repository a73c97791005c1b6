"""Model files of which a worker has got only the parts that its devices own, from rank 0.

The worker keeps a sparse file of the model's full size in its cache folder: the header, and the bytes of its own parts
of weights. Rank 0 sends *pieces*: ranges of bytes at a constant distance, as columns of a matrix are. A journal beside
the files names each piece that was written, with its hash. So a broken transfer is continued, and a piece that has
changed on disk is fetched again.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from motley.caches import cache_folder
from motley.errors import DeviceError
from motley.formats import get_format
from motley.gguf import ModelSpec, read_spec
from motley.graph import Tensor
from motley.graph.ops import Weight
from motley.ownership import Split, State
from motley.runtime.hosts.protocol import ProtocolError
from motley.split.localize import LocalGraph
from motley.units import show_bytes

PIECE_BYTES = 1 << 20
_AHEAD = 4  # pieces that are requested before they are needed
_MAX_FILES = 1000
_JOURNAL = "journal"
_PIECE = struct.Struct("<IQQQI")

Fetch = Callable[[bytes], None]  # sends a request to rank 0
Receive = Callable[[], bytes]  # waits for the next answer
Progress = Callable[[int, int], None]


class Piece(NamedTuple):
    """`n_ranges` ranges of `length` bytes, `stride` bytes apart, from `offset` of a file on."""

    file: int
    offset: int
    length: int
    stride: int
    n_ranges: int

    @property
    def n_bytes(self) -> int:
        return self.length * self.n_ranges

    def starts(self) -> range:
        return range(self.offset, self.offset + self.stride * self.n_ranges, self.stride)


class ModelFiles:
    """Rank 0's side: the files of a model, of which workers ask for pieces."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _spec(self) -> ModelSpec:
        return read_spec(self._path)

    def answer(self, request: bytes) -> bytes:
        """The bytes of a piece; a description of all files if the request is empty."""
        parts = self._spec.parts
        if not request:
            files = [
                {
                    "name": part.path.name,
                    "size": len(part.data),
                    "n_head": min((info.offset for info in part.tensors), default=len(part.data)),
                }
                for part in parts
            ]
            return json.dumps({"files": files}).encode()
        if len(request) != _PIECE.size:
            raise ProtocolError("a request for a piece of another size")
        piece = Piece(*_PIECE.unpack(request))
        is_right = (
            piece.file < len(parts)
            and 0 < piece.length <= max(piece.stride, 1)
            and piece.n_ranges > 0
            and piece.n_bytes <= PIECE_BYTES
            and piece.starts()[-1] + piece.length <= len(parts[piece.file].data)
        )
        if not is_right:
            raise ProtocolError("a request for a piece that is not in the model file")
        data = parts[piece.file].data
        return b"".join(data[start : start + piece.length] for start in piece.starts())


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    n_head: int  # bytes before the first tensor


class StreamedModel:
    """The worker's side: the files of one model in the cache folder. `close` ends what it has opened."""

    def __init__(self, folder: Path, fetch: Fetch, receive: Receive, progress: Progress) -> None:
        """`folder`: of this model alone, named by its fingerprint."""
        self._fetch, self._receive, self._progress = fetch, receive, progress
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._journal = (folder / _JOURNAL).open("a+")
            fcntl.flock(self._journal, fcntl.LOCK_EX)  # another worker may be fetching its own parts
        except OSError as error:
            raise DeviceError(
                f"cannot write to {folder}: {error.strerror}", hint="--cache names another folder"
            ) from error
        self._hashes = self._read_journal()
        self._files = self._describe()
        self._open = [self._create(file) for file in self._files]

    def read_spec(self) -> ModelSpec:
        """The model's description, from the header that is fetched first."""
        heads = [Piece(index, 0, file.n_head, file.n_head, 1) for index, file in enumerate(self._files)]
        self._bring([part for head in heads for part in _portions(head)])
        return read_spec(self._folder / self._files[0].name)

    def bring_weights(self, spec: ModelSpec, shares: Sequence[tuple[int, LocalGraph]]) -> None:
        """Fetches what these devices need of their weights, unless it is there."""
        pieces = dict.fromkeys(
            part
            for device, share in shares
            for piece in needed_pieces(spec, share, device)
            for part in _portions(piece)
        )
        self._bring(list(pieces))

    def close(self) -> None:
        for file in self._open:
            os.close(file)
        self._open = []
        self._journal.close()  # and frees the lock

    def _bring(self, pieces: Sequence[Piece]) -> None:
        missing = [piece for piece in pieces if not self._is_there(piece)]
        n_bytes = sum(piece.n_bytes for piece in missing)
        free = shutil.disk_usage(self._folder).free
        if n_bytes > free:
            raise DeviceError(
                f"{self._folder} has {show_bytes(free)} free, but the parts of the model take {show_bytes(n_bytes)}",
                hint="--cache names another folder",
            )
        waiting = deque(missing)
        asked: deque[Piece] = deque()
        n_done = 0
        while waiting or asked:
            while waiting and len(asked) < _AHEAD:
                asked.append(waiting.popleft())
                self._fetch(_PIECE.pack(*asked[-1]))
            piece = asked.popleft()
            self._write(piece, self._receive())
            n_done += piece.n_bytes
            self._progress(n_done, n_bytes)

    def _write(self, piece: Piece, data: bytes) -> None:
        if len(data) != piece.n_bytes:
            raise ProtocolError(f"{len(data)} bytes of the model instead of {piece.n_bytes}")
        try:
            for index, start in enumerate(piece.starts()):
                os.pwrite(self._open[piece.file], data[index * piece.length :][: piece.length], start)
            self._hashes[piece] = _hash(data)
            self._journal.write(json.dumps([*piece, self._hashes[piece]]) + "\n")
            self._journal.flush()
        except OSError as error:
            raise DeviceError(f"cannot write to {self._folder}: {error.strerror}") from error

    def _is_there(self, piece: Piece) -> bool:
        if piece not in self._hashes:
            return False
        data = b"".join(os.pread(self._open[piece.file], piece.length, start) for start in piece.starts())
        return _hash(data) == self._hashes[piece]

    def _describe(self) -> list[_File]:
        self._fetch(b"")
        try:
            fields = json.loads(self._receive())
            files = [_File(str(f["name"]), int(f["size"]), int(f["n_head"])) for f in fields["files"]]
        except (ValueError, KeyError, TypeError):
            raise ProtocolError("a description of model files that cannot be read") from None
        is_right = 0 < len(files) <= _MAX_FILES and all(
            _is_plain(file.name) and 0 < file.n_head <= file.size for file in files
        )
        if not is_right:
            raise ProtocolError("a description of model files that cannot be right")
        return files

    def _create(self, file: _File) -> int:
        found = os.open(self._folder / file.name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(found).st_size != file.size:
            os.ftruncate(found, file.size)
        return found

    def _read_journal(self) -> dict[Piece, str]:
        self._journal.seek(0)
        found: dict[Piece, str] = {}
        line = "\n"
        for line in self._journal:
            try:
                *numbers, digest = json.loads(line)
                found[Piece(*map(int, numbers))] = str(digest)
            except (ValueError, TypeError):
                continue  # a line whose end was not written
        if not line.endswith("\n"):
            self._journal.write("\n")
        return found


def needed_pieces(spec: ModelSpec, share: LocalGraph, device: int) -> Iterator[Piece]:
    """The bytes of the model files that a device reads. Tensors of which weights are only some rows come whole."""
    for node in share.graph.weights:
        assert isinstance(node.op, Weight)
        info = spec.tensors[node.op.source]
        ranges = _ranges(node, share.layouts[node.name], device, info.shape)
        if ranges is None:
            yield Piece(info.part, info.offset, info.nbytes, info.nbytes, 1)
            continue
        axis, parts = ranges
        n_outer = math.prod(info.shape[:axis])
        stride = info.nbytes // n_outer
        for start, stop in parts:
            first, last = (stride * n // info.shape[axis] for n in (start, stop))
            if first < last:
                yield Piece(info.part, info.offset + first, last - first, stride, n_outer)


def _ranges(
    node: Tensor, state: State, device: int, shape: tuple[int, ...]
) -> tuple[int, list[tuple[int, int]]] | None:
    """The axis of the tensor that is cut, and the device's indices; None: the device reads all of it."""
    op: Any = node.op
    if not isinstance(state, Split) or op.rows or op.middle is not None or not state.fits(shape):
        return None
    block = get_format(op.format).block_size if state.axis == len(shape) - 1 else 1
    parts = list(state.word.global_ranges(device))
    if any(start % block or stop % block for start, stop in parts):
        return None
    return state.axis, parts


def _portions(piece: Piece) -> Iterator[Piece]:
    """The piece as pieces that fit into a message."""
    if piece.length <= PIECE_BYTES:
        n_each = PIECE_BYTES // piece.length
        for first in range(0, piece.n_ranges, n_each):
            count = min(n_each, piece.n_ranges - first)
            yield piece._replace(offset=piece.offset + first * piece.stride, n_ranges=count)
        return
    for start in piece.starts():
        for first in range(0, piece.length, PIECE_BYTES):
            length = min(PIECE_BYTES, piece.length - first)
            yield Piece(piece.file, start + first, length, length, 1)


def _is_plain(name: str) -> bool:
    """Whether it is the name of a file in a folder, and no path."""
    return name == Path(name).name and name not in ("", ".", "..", _JOURNAL) and "\0" not in name


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def default_cache() -> Path:
    return cache_folder() / "parts"
