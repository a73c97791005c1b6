"""Requests, the scheduler, sampling: from prompts to tokens."""

from motley.engine.bare import BareSequence
from motley.engine.engine import Engine
from motley.engine.params import SamplingParams
from motley.engine.request import Completion, Request, Timings

__all__ = ["BareSequence", "Completion", "Engine", "Request", "SamplingParams", "Timings"]
