"""The tensor table of one file: names, shapes, types and places, checked against each other and the file."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from motley.errors import GGUFError, ModelError
from motley.formats import Format, get_format
from motley.gguf.cursor import DAMAGED, Cursor

_MAX_DIMS = 4


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's name, type, shape and place in the file. Types that Motley cannot compute with are listed, too."""

    name: str
    shape: tuple[int, ...]  # row-major: GGUF's dimensions reversed
    type_name: str  # as ggml calls it: "F32", "Q4_K", "MXFP4", ...
    nbytes: int
    part: int  # which file of the model
    offset: int  # from the start of that file

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)

    @property
    def format(self) -> Format:
        """How to unpack it; a `ModelError` for a type that Motley does not know."""
        try:
            return get_format(self.type_name)
        except ModelError as error:
            message = f"tensor {self.name!r} is stored as {self.type_name}, which is not supported"
            raise ModelError(message, hint=error.hint) from None


def read_tensors(cursor: Cursor, n_tensors: int, alignment: int, part: int) -> tuple[TensorInfo, ...]:
    """The table that starts at the cursor, with offsets from the start of the file."""
    relative: dict[str, TensorInfo] = {}
    for index in range(n_tensors):
        cursor.where = f"tensor {index + 1} of {n_tensors}"
        info = _read_tensor(cursor, alignment, part)
        if info.name in relative:
            raise cursor.error("is there twice")
        relative[info.name] = info
    data_start = -(-cursor.position // alignment) * alignment
    tensors = tuple(replace(info, offset=data_start + info.offset) for info in relative.values())
    _check_places(cursor, tensors)
    return tensors


def _read_tensor(cursor: Cursor, alignment: int, part: int) -> TensorInfo:
    name = cursor.string()
    if not name:
        raise cursor.error("has no name")
    cursor.where = f"tensor {name[:100]!r}"
    shape = _read_shape(cursor)
    type_name, block_size, block_bytes = _read_type(cursor)
    if shape[-1] % block_size:
        raise cursor.error(
            f"a row of {shape[-1]} values is not whole {type_name} blocks of {block_size} values"
        )
    nbytes = math.prod(shape) // block_size * block_bytes
    offset = cursor.unsigned("Q")
    if offset % alignment:
        raise cursor.error(f"its offset {offset} is not a multiple of the alignment {alignment}")
    return TensorInfo(name, shape, type_name, nbytes, part, offset)


def _read_shape(cursor: Cursor) -> tuple[int, ...]:
    n_dims = cursor.unsigned("I")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise cursor.error(f"has {n_dims:,} dimensions; 1 to {_MAX_DIMS} are possible")
    shape = tuple(cursor.unsigned("Q") for _ in range(n_dims))[::-1]
    if 0 in shape:
        raise cursor.error(f"has an empty dimension in its shape {shape}")
    return shape


def _read_type(cursor: Cursor) -> tuple[str, int, int]:
    """Name, values per block, bytes per block."""
    number = cursor.unsigned("I")
    try:
        ggml_type = GGMLQuantizationType(number)
        return (ggml_type.name, *GGML_QUANT_SIZES[ggml_type])
    except (ValueError, KeyError):
        hint = "it may be newer than this version of Motley, or the file is damaged"
        raise cursor.error(f"the tensor type {number} is unknown", hint=hint) from None


def _check_places(cursor: Cursor, tensors: tuple[TensorInfo, ...]) -> None:
    """Checks that every tensor is inside the file, and that no two share a byte."""
    for info in tensors:
        end = info.offset + info.nbytes
        if end > cursor.size:
            cursor.where = f"tensor {info.name[:100]!r}"
            message = f"shape {info.shape} as {info.type_name} would end at byte {end:,} of {cursor.size:,}"
            raise cursor.error(message, hint=DAMAGED)
    for before, after in pairwise(sorted(tensors, key=lambda info: info.offset)):
        if before.offset + before.nbytes > after.offset:
            raise GGUFError(f"{cursor.path}: the tensors {before.name!r} and {after.name!r} overlap")
