"""Motley: LLM inference on a motley crew of devices."""

from motley.errors import MotleyError

__version__ = "0.1.0"
__all__ = ["MotleyError", "__version__"]
