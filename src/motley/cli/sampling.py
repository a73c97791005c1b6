"""The flags for sampling."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from motley.cli import options
from motley.engine import SamplingParams
from motley.errors import ConfigError

_DEFAULT = SamplingParams()


@dataclass(frozen=True)
class SamplingOptions:
    """The flags that `SamplingParams` takes."""

    temp: options.Temp = _DEFAULT.temperature
    top_k: options.TopK = _DEFAULT.top_k
    top_p: options.TopP = _DEFAULT.top_p
    min_p: options.MinP = _DEFAULT.min_p
    typical: options.Typical = _DEFAULT.typical_p
    repeat_penalty: options.RepeatPenalty = _DEFAULT.repeat_penalty
    repeat_last_n: options.RepeatLastN = _DEFAULT.repeat_last_n
    presence_penalty: options.PresencePenalty = _DEFAULT.presence_penalty
    frequency_penalty: options.FrequencyPenalty = _DEFAULT.frequency_penalty
    logit_bias: options.LogitBias = None
    seed: options.Seed = -1

    def arguments(self) -> dict[str, Any]:
        """The flags as keyword arguments of `SamplingParams`."""
        return {
            "temperature": self.temp,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "typical_p": self.typical,
            "repeat_penalty": self.repeat_penalty,
            "repeat_last_n": self.repeat_last_n,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": dict(map(_bias, self.logit_bias or ())),
            "seed": None if self.seed == -1 else self.seed,
        }


def _bias(text: str) -> tuple[int, float]:
    """The token and its bias, from llama.cpp's `15043+1` or `15043-inf`."""
    found = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+|inf))", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(
            f"--logit-bias {text!r} is not a token id and a bias",
            hint="for example 15043+1, or 15043-inf to ban it",
        )
    return int(found[1]), float(found[2])
