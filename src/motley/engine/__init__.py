"""Requests, the scheduler, sampling, and the service that runs them: from prompts to tokens."""

from motley.engine.engine import Engine
from motley.engine.params import SamplingParams
from motley.engine.raw import RawSequence
from motley.engine.request import Completion, Request, Timings
from motley.engine.service import EngineService
from motley.engine.streams import AsyncStream, Stream

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
]
