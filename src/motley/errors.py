"""Errors that a user can cause, in one tree: `except MotleyError` catches all of them.

MotleyError
├── ConfigError       an invalid option or argument
├── GGUFError         a model file that is damaged or contradicts its header
├── ModelError        an architecture or a tensor that Motley cannot run
├── TokenizerError    a vocabulary that is missing, damaged or unknown
├── TemplateError     a chat template that fails, or uses a feature that is not allowed
├── GraphError        a graph that breaks a rule of one of its ops
├── SplitError        a split that no rule of an op allows
├── PlanError         no kernel or not enough memory for a plan
├── DeviceError       a device that is unknown, missing or has failed
│   └── LostWorkerError   a worker process of the crew that has ended or does not answer
│       └── FailedWorkerError   one that has reported an error in its work
├── CacheError        a KV cache request that can never be fulfilled
└── RequestError      a generation request that cannot be served

Asserts are for bugs in Motley; these errors are for wrong input and failing devices.
"""

from __future__ import annotations

from collections.abc import Sequence


class MotleyError(Exception):
    """Base class. The message says what is wrong and where; `hint` says how to fix it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(MotleyError):
    """An invalid option or argument."""


class GGUFError(MotleyError):
    """A model file that is damaged or contradicts its header."""


class ModelError(MotleyError):
    """An architecture or a tensor that Motley cannot run."""


class TokenizerError(MotleyError):
    """A vocabulary that is missing, damaged or unknown."""


class TemplateError(MotleyError):
    """A chat template that fails, or uses a feature that is not allowed."""


class GraphError(MotleyError):
    """A graph that breaks a rule of one of its ops."""


class SplitError(MotleyError):
    """A split that no rule of an op allows: the op, the states of its inputs, and the reason."""

    def __init__(self, op: str, states: Sequence[object], why: str, *, hint: str | None = None) -> None:
        lie = f" (inputs are {', '.join(map(str, states))})" if states else ""
        super().__init__(f"{op}: {why}{lie}", hint=hint)
        self.op = op
        self.states = tuple(states)
        self.why = why


class PlanError(MotleyError):
    """No kernel or not enough memory for a plan."""


class DeviceError(MotleyError):
    """A device that is unknown, missing or has failed."""


class LostWorkerError(DeviceError):
    """A worker process of the crew that has ended or does not answer: its host, and the reason."""

    def __init__(self, host: str, why: str, *, hint: str | None = None) -> None:
        super().__init__(f"lost the worker {host}: {why}", hint=hint)
        self.host = host
        self.why = why


class FailedWorkerError(LostWorkerError):
    """A worker process of the crew that has reported an error in its work. It has left the crew, but it is there."""

    def __init__(self, host: str, why: str, *, hint: str | None = None) -> None:
        super().__init__(host, why, hint=hint)
        self.message = f"the worker {host} has failed: {why}"


class CacheError(MotleyError):
    """A KV cache request that can never be fulfilled."""


class RequestError(MotleyError):
    """A generation request that cannot be served."""
