"""Motley: LLM inference on a motley crew of devices."""

from __future__ import annotations

from motley.engine import Completion, SamplingParams, Timings
from motley.errors import MotleyError
from motley.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "MotleyError", "SamplingParams", "Timings", "__version__"]
