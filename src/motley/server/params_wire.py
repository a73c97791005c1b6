"""SamplingParams as plain data, and back: only what differs from the defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from motley.engine.params import SamplingParams

_DEFAULTS = vars(SamplingParams())


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    return {
        name: _plain(value)
        for name, value in vars(params).items()
        if value is not (default := _DEFAULTS[name]) and value != default
    }


def params_from_wire(values: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**{name: _restored(name, value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    """JSON has no integer keys and no infinity: a mapping becomes pairs, -inf becomes null in them."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return dict(value)
        return [[key, None if item == -math.inf else item] for key, item in value.items()]
    return list(value) if isinstance(value, tuple | frozenset) else value


def _restored(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return {key: -math.inf if item is None else item for key, item in value}
    return value
