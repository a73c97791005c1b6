"""GGUF files: metadata and memory-mapped tensors. Nothing in a file is trusted, and nothing is loaded early.

cursor    bounded reading of little-endian numbers, strings and arrays
metadata  keys and values, with typed access
header    a file's beginning: mapping, version, metadata
values    reading the metadata
tensors   reading the tensor table
part      one file: header, metadata, tensor table
spec      a model: one file, or all the parts of a split one
inspect   what a model holds, as plain data
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from motley.gguf.header import read_metadata
from motley.gguf.metadata import REQUIRED, Metadata, Value

__all__ = [
    "REQUIRED",
    "Metadata",
    "ModelSpec",
    "Part",
    "TensorInfo",
    "Value",
    "describe",
    "read_metadata",
    "read_spec",
]

if TYPE_CHECKING:
    from motley.gguf.inspect import describe
    from motley.gguf.part import Part
    from motley.gguf.spec import ModelSpec, read_spec
    from motley.gguf.tensors import TensorInfo
else:
    _MODULES = {
        "ModelSpec": "spec",
        "Part": "part",
        "TensorInfo": "tensors",
        "describe": "inspect",
        "read_spec": "spec",
    }

    def __getattr__(name: str) -> Any:
        """Imported when it is first used: metadata needs no torch, tensors do."""
        if name not in _MODULES:
            raise AttributeError(f"module 'motley.gguf' has no attribute {name!r}")
        return getattr(import_module(f"motley.gguf.{_MODULES[name]}"), name)
