"""Requests, the scheduler, sampling, and the service that runs them: from prompts to tokens.

Names are imported when they are first used: parameters and results need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    "AsyncStream": "streams",
    "Completion": "request",
    "Engine": "engine",
    "EngineService": "service",
    "RawSequence": "raw",
    "Request": "request",
    "SamplingParams": "params",
    "Stream": "streams",
    "Timings": "request",
    "TokenLogprobs": "request",
}
__all__ = [
    "AsyncStream",
    "Completion",
    "Engine",
    "EngineService",
    "RawSequence",
    "Request",
    "SamplingParams",
    "Stream",
    "Timings",
    "TokenLogprobs",
]

if TYPE_CHECKING:
    from motley.engine.engine import Engine
    from motley.engine.params import SamplingParams
    from motley.engine.raw import RawSequence
    from motley.engine.request import Completion, Request, Timings, TokenLogprobs
    from motley.engine.service import EngineService
    from motley.engine.streams import AsyncStream, Stream
else:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'motley.engine' has no attribute {name!r}")
        return getattr(import_module(f"motley.engine.{_MODULES[name]}"), name)
