"""GGUF files byte by byte, so that tests can make defective ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, value_type: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", value_type) + payload


def u32(name: str, value: int) -> bytes:
    return key(name, GGUFValueType.UINT32, struct.pack("<I", value))


def u64(name: str, value: int) -> bytes:
    return key(name, GGUFValueType.UINT64, struct.pack("<Q", value))


def text(name: str, value: str | bytes) -> bytes:
    return key(name, GGUFValueType.STRING, string(value))


def array(item_type: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", item_type, count) + items


def tensor(
    name: str, dims: Sequence[int] = (4,), tensor_type: int = GGMLQuantizationType.F32, offset: int = 0
) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor_type, offset)


ARCHITECTURE = text("general.architecture", "llama")


def gguf_file(
    keys: Sequence[bytes] = (ARCHITECTURE,),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file; counts are right unless told otherwise."""
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def small_model() -> bytes:
    """A valid file with every kind of value, and tensors of several types and ranks."""
    numbers = {
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
        GGUFValueType.BOOL: "?",
    }
    keys = [ARCHITECTURE, u32("general.alignment", 32), text("general.name", "naïve 名前")]
    for value_type, code in numbers.items():
        keys.append(key(f"one.{value_type.name}", value_type, struct.pack(f"<{code}", 1)))
        items = array(value_type, 3, struct.pack(f"<3{code}", 0, 1, 1))
        keys.append(key(f"some.{value_type.name}", GGUFValueType.ARRAY, items))
    words = array(GGUFValueType.STRING, 3, string("a") + string("") + string("ß"))
    keys.append(key("some.words", GGUFValueType.ARRAY, words))
    nested = array(GGUFValueType.ARRAY, 2, words + array(GGUFValueType.UINT8, 0))
    keys.append(key("some.arrays", GGUFValueType.ARRAY, nested))
    tensors = [
        tensor("a", (4, 2), GGMLQuantizationType.F32, 0),  # 32 bytes
        tensor("b", (64, 1, 2), GGMLQuantizationType.Q4_0, 32),  # 72 bytes, padded to 96
        tensor("c", (256,), GGMLQuantizationType.Q4_K, 128),  # 144 bytes
    ]
    data = np.random.default_rng(0).integers(0, 256, 128 + 144, dtype=np.uint8).tobytes()
    return gguf_file(keys, tensors, data)
