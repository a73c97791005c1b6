"""GGUF files: metadata and memory-mapped tensors. Nothing in a file is trusted, and nothing is loaded early.

cursor    bounded reading of little-endian numbers, strings and arrays
metadata  keys and values, with typed access
values    reading the metadata
tensors   reading the tensor table
part      one file: header, metadata, tensor table
spec      a model: one file, or all the parts of a split one
inspect   what a model holds, as plain data
"""

from __future__ import annotations

from motley.gguf.inspect import describe
from motley.gguf.metadata import REQUIRED, Metadata, Value
from motley.gguf.part import Part
from motley.gguf.spec import ModelSpec, read_spec
from motley.gguf.tensors import TensorInfo

__all__ = ["REQUIRED", "Metadata", "ModelSpec", "Part", "TensorInfo", "Value", "describe", "read_spec"]
