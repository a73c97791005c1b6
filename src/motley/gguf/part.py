"""One GGUF file, mapped and checked.

    magic "GGUF", version u32, tensors u64, keys u64, keys and values, tensor table, padding, tensor data

All numbers are little endian. The tensor data, and each tensor in it, starts at a multiple of the alignment.
"""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGUF_DEFAULT_ALIGNMENT

from motley.errors import GGUFError
from motley.gguf.cursor import Cursor
from motley.gguf.metadata import Metadata
from motley.gguf.tensors import LEAST_TENSOR_BYTES, TensorInfo, read_tensors
from motley.gguf.values import LEAST_KEY_BYTES, read_values

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_LEAST_ALIGNMENT = 8  # bytes
_LARGEST_ALIGNMENT = 2**20


@dataclass(frozen=True, eq=False)
class Part:
    """One file of a model."""

    path: Path
    version: int
    data: mmap.mmap
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]


def read_part(path: Path, index: int = 0) -> Part:
    """Maps and checks a file, the `index`-th of its model."""
    data = _map(path)
    cursor = Cursor(data, path)
    version = _read_version(cursor)
    n_tensors = cursor.count("tensors", LEAST_TENSOR_BYTES)
    n_keys = cursor.count("metadata keys", LEAST_KEY_BYTES)
    metadata = Metadata(read_values(cursor, n_keys), path)
    tensors = read_tensors(cursor, n_tensors, _alignment(metadata), index)
    return Part(path, version, data, metadata, tensors)


def _map(path: Path) -> mmap.mmap:
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
        why = error.strerror or error
        raise GGUFError(f"{path}: cannot be opened: {why}", hint="may this user read it?") from None


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


def _alignment(metadata: Metadata) -> int:
    alignment = metadata.int(_ALIGNMENT_KEY, GGUF_DEFAULT_ALIGNMENT)
    is_power_of_two = alignment > 0 and alignment & (alignment - 1) == 0
    if not is_power_of_two or not _LEAST_ALIGNMENT <= alignment <= _LARGEST_ALIGNMENT:
        allowed = f"a power of two from {_LEAST_ALIGNMENT} to {_LARGEST_ALIGNMENT:,}"
        raise GGUFError(f"{metadata.path}: {_ALIGNMENT_KEY} is {alignment}; it has to be {allowed}")
    return alignment
