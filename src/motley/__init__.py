"""Motley: LLM inference on a motley crew of devices."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from motley.errors import MotleyError

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "MotleyError", "SamplingParams", "Timings", "__version__"]

if TYPE_CHECKING:
    from motley.engine import Completion, SamplingParams, Timings
    from motley.llm import LLM
else:

    def __getattr__(name: str) -> Any:
        """Imported when it is first used: what needs no torch, such as `motley --help`, does not wait for it."""
        if name not in __all__:
            raise AttributeError(f"module 'motley' has no attribute {name!r}")
        return getattr(import_module("motley.llm" if name == "LLM" else "motley.engine"), name)
