"""The contents of a model file, as plain data: `json.dumps` takes it, and a table can show it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

from motley.formats import FORMATS
from motley.gguf.metadata import Value, item_kind
from motley.gguf.spec import ModelSpec
from motley.gguf.tensors import TensorInfo

_SHOWN_ITEMS = 8  # of an array; a shorter one is shown whole


class FileRow(TypedDict):
    path: str
    bytes: int
    version: int  # of GGUF
    tensors: int


class TypeRow(TypedDict):
    type: str
    is_supported: bool
    tensors: int
    parameters: int
    bytes: int
    bits_per_weight: float


class TensorRow(TypedDict):
    name: str
    shape: list[int]  # row-major: the last axis is contiguous in memory
    type: str
    parameters: int
    bytes: int
    file: int  # index into files
    offset: int  # from the start of that file


class Description(TypedDict):
    files: list[FileRow]
    architecture: str | None
    name: str | None
    parameters: int
    bytes: int  # of the tensors
    bits_per_weight: float
    types: list[TypeRow]  # most bytes first
    metadata: dict[str, Any]  # long arrays as {"count": ..., "of": ..., "first": [...]}
    tensors: list[TensorRow]  # in the order of the files


def describe(spec: ModelSpec) -> Description:
    """The contents of a model. No tensor is read."""
    tensors = list(spec.tensors.values())
    return {
        "files": [
            {
                "path": str(part.path),
                "bytes": len(part.data),
                "version": part.version,
                "tensors": len(part.tensors),
            }
            for part in spec.parts
        ],
        "architecture": spec.metadata.str("general.architecture", None),
        "name": spec.metadata.str("general.name", None),
        "parameters": sum(info.n_values for info in tensors),
        "bytes": sum(info.nbytes for info in tensors),
        "bits_per_weight": _bits_per_weight(tensors),
        "types": _type_rows(tensors),
        "metadata": {key: _plain(value) for key, value in spec.metadata.items()},
        "tensors": [_tensor_row(info) for info in tensors],
    }


def _type_rows(tensors: Sequence[TensorInfo]) -> list[TypeRow]:
    by_type: defaultdict[str, list[TensorInfo]] = defaultdict(list)
    for info in tensors:
        by_type[info.type_name].append(info)
    rows: list[TypeRow] = [
        {
            "type": name,
            "is_supported": name in FORMATS,
            "tensors": len(group),
            "parameters": sum(info.n_values for info in group),
            "bytes": sum(info.nbytes for info in group),
            "bits_per_weight": _bits_per_weight(group),
        }
        for name, group in by_type.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def _tensor_row(info: TensorInfo) -> TensorRow:
    return {
        "name": info.name,
        "shape": list(info.shape),
        "type": info.type_name,
        "parameters": info.n_values,
        "bytes": info.nbytes,
        "file": info.part,
        "offset": info.offset,
    }


def _bits_per_weight(tensors: Sequence[TensorInfo]) -> float:
    values = sum(info.n_values for info in tensors)
    return round(8 * sum(info.nbytes for info in tensors) / values, 4) if values else 0.0


def _plain(value: Value) -> Any:
    """A value that JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if not isinstance(value, np.ndarray | tuple):
        return value
    shown = value[:_SHOWN_ITEMS]
    first = [_plain(item) for item in (shown.tolist() if isinstance(shown, np.ndarray) else shown)]
    return (
        first if len(value) == len(first) else {"count": len(value), "of": item_kind(value), "first": first}
    )
