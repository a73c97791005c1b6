"""Reading metadata: keys, each with a typed value. Types, counts, lengths and nesting are checked first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from gguf.constants import GGUFValueType
from numpy.typing import NDArray

from motley.gguf.cursor import Cursor
from motley.gguf.metadata import Value

MIN_KEY_BYTES = 8 + 1 + 4 + 1  # the key's length, a byte of it, the value's type, a byte of value

_MAX_KEY_BYTES = 2**16 - 1
_MAX_NESTING = 4  # arrays in arrays
_MIN_STRING_BYTES = 8  # the length
_MIN_ARRAY_BYTES = 4 + 8  # type and count

# Numbers, as `struct` and numpy both spell them.
_NUMBER_CODES: Mapping[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
}


def read_values(cursor: Cursor, n_keys: int) -> dict[str, Value]:
    """The next `n_keys` keys and their values."""
    values: dict[str, Value] = {}
    for index in range(n_keys):
        cursor.where = f"metadata key {index + 1} of {n_keys}"
        key = cursor.string()
        if not 0 < len(key.encode()) <= _MAX_KEY_BYTES:
            raise cursor.error(f"a key has 1 to {_MAX_KEY_BYTES:,} bytes, not {len(key.encode()):,}")
        cursor.where = f"metadata key {key[:100]!r}"
        if key in values:
            raise cursor.error("is there twice")
        values[key] = _read_value(cursor)
    return values


def _read_value(cursor: Cursor) -> Value:
    value_type = _read_type(cursor)
    if value_type == GGUFValueType.STRING:
        return cursor.string()
    if value_type == GGUFValueType.ARRAY:
        return _read_array(cursor, depth=1)
    if value_type == GGUFValueType.BOOL:
        return bool(_read_bools(cursor, 1)[0])
    return cursor.number(_NUMBER_CODES[value_type])


def _read_array(cursor: Cursor, depth: int) -> Value:
    if depth > _MAX_NESTING:
        raise cursor.error(f"arrays are nested more than {_MAX_NESTING} deep")
    item_type = _read_type(cursor)
    if item_type == GGUFValueType.STRING:
        return cursor.strings(cursor.count("strings", _MIN_STRING_BYTES))
    if item_type == GGUFValueType.ARRAY:
        count = cursor.count("arrays", _MIN_ARRAY_BYTES)
        return tuple(_read_array(cursor, depth + 1) for _ in range(count))
    if item_type == GGUFValueType.BOOL:
        return _read_bools(cursor, cursor.count("booleans", 1))
    return cursor.numbers(_NUMBER_CODES[item_type], cursor.count("numbers", 1))


def _read_bools(cursor: Cursor, count: int) -> NDArray[np.bool_]:
    raw = cursor.numbers("B", count)
    if (raw > 1).any():
        raise cursor.error(f"a boolean is 0 or 1, not {raw.max()}")
    return raw.view(np.bool_)


def _read_type(cursor: Cursor) -> GGUFValueType:
    number = cursor.unsigned("I")
    try:
        return GGUFValueType(number)
    except ValueError:
        raise cursor.error(f"the value type {number} is unknown") from None
