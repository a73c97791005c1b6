"""Measures speed: random models of known shapes, prefill and decode at a context depth, and their roofline."""

from motley.bench.bandwidth import read_bandwidth
from motley.bench.environment import environment
from motley.bench.measure import Measurement, Workload, measure
from motley.bench.random_model import random_model_path, write_random_model
from motley.bench.shapes import SHAPES

__all__ = [
    "SHAPES",
    "Measurement",
    "Workload",
    "environment",
    "measure",
    "random_model_path",
    "read_bandwidth",
    "write_random_model",
]
