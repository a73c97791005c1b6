"""The beginning of a GGUF file: its mapping, version, counts and metadata. Imports no torch."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

from motley.errors import GGUFError
from motley.gguf.cursor import Cursor
from motley.gguf.metadata import Metadata
from motley.gguf.values import MIN_KEY_BYTES, read_values

# An entry of the tensor table has: its name's length, a byte of it, dimensions, one dimension, type, offset.
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """The metadata of a file; its tensors are not looked at."""
    return open_header(map_file(Path(path)), Path(path))[3]


def open_header(data: mmap.mmap, path: Path) -> tuple[Cursor, int, int, Metadata]:
    """A cursor at the tensor table, the version, the number of tensors and the metadata."""
    cursor = Cursor(data, path)
    version = _read_version(cursor)
    n_tensors = cursor.count("tensors", MIN_TENSOR_BYTES)
    n_keys = cursor.count("metadata keys", MIN_KEY_BYTES)
    return cursor, version, n_tensors, Metadata(read_values(cursor, n_keys), path)


def map_file(path: Path) -> mmap.mmap:
    """A private mapping: pages come from the page cache, and a stray write never reaches the disk."""
    try:
        if path.is_fifo():  # opening it blocks until another process writes to it
            raise GGUFError(f"{path}: this is a pipe", hint="a model is mapped, so it has to be a file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise GGUFError(f"{path}: the file is empty", hint="download it again")
            if sys.platform != "linux":
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            # Without NORESERVE the kernel refuses a model that is larger than memory and swap.
            no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it since 3.13
            return mmap.mmap(
                file.fileno(), 0, mmap.MAP_PRIVATE | no_reserve, mmap.PROT_READ | mmap.PROT_WRITE
            )
    except OSError as error:
        raise _cannot_open(path, error) from None


def _cannot_open(path: Path, error: OSError) -> GGUFError:
    match error:
        case FileNotFoundError() if path.parts[0].startswith("~"):
            return GGUFError(
                f"{path}: there is no such file", hint="~ means nothing here: give the whole path"
            )
        case FileNotFoundError():
            hint = None if path.is_absolute() else "the path begins in the current folder"
            return GGUFError(f"{path}: there is no such file", hint=hint)
        case IsADirectoryError():
            return GGUFError(f"{path}: this is a folder", hint="give the path of a .gguf file in it")
        case PermissionError():
            return GGUFError(
                f"{path}: this user may not read it", hint="change the file's permissions or its owner"
            )
        case _:
            return GGUFError(f"{path}: cannot be opened: {error.strerror or error}")


def _read_version(cursor: Cursor) -> int:
    magic = bytes(cursor.bytes(len(_MAGIC)))
    if magic != _MAGIC:
        message = f"the file starts with {magic!r} and not with {_MAGIC!r}: it is not GGUF"
        raise cursor.error(message, hint="Motley reads GGUF models only; others have to be converted first")
    version = cursor.unsigned("I")
    if version in _VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise cursor.error(
            "the file is big endian",
            hint="convert it with gguf-convert-endian, which comes with the gguf package",
        )
    hint = f"versions {' and '.join(map(str, _VERSIONS))} are; convert the model again"
    raise cursor.error(f"GGUF version {version} is not supported", hint=hint)
