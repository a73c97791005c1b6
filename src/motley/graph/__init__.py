"""Compute graphs for one device: tensors, ops, a verifier. Independent of devices, files and cache layouts."""

from motley.graph.graph import Graph
from motley.graph.tensor import CACHE, F32, HANDLES, I32, RECURRENT, Op, Sample, Shape, Tensor, Way

__all__ = ["CACHE", "F32", "HANDLES", "I32", "RECURRENT", "Graph", "Op", "Sample", "Shape", "Tensor", "Way"]
