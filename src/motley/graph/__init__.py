"""Compute graphs for one device: tensors, ops, a verifier. Independent of devices, files and cache layouts."""

from motley.graph.graph import Graph
from motley.graph.tensor import CACHE, F32, I32, Op, Sample, Shape, Tensor, Way

__all__ = ["CACHE", "F32", "I32", "Graph", "Op", "Sample", "Shape", "Tensor", "Way"]
