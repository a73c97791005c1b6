"""Measures speed: random models of known shapes, prefill and decode at a context depth, and their roofline."""

from motley.bench.bandwidth import read_bandwidth
from motley.bench.environment import environment
from motley.bench.measure import Measurement, Workload, measure
from motley.bench.random_model import random_model_path, write_random_model
from motley.bench.shapes import SHAPES
from motley.bench.speculation import SpecMeasurement, measure_speculation

__all__ = [
    "SHAPES",
    "Measurement",
    "SpecMeasurement",
    "Workload",
    "environment",
    "measure",
    "measure_speculation",
    "random_model_path",
    "read_bandwidth",
    "write_random_model",
]
