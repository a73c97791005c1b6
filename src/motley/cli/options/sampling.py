"""The flags for sampling."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from motley.cli.options.flag import flag
from motley.engine import SamplingParams
from motley.errors import ConfigError

_PANEL = "Sampling"  # of --help

Temp = Annotated[
    float,
    flag(
        "--temp",
        "--temperature",
        text="Randomness; 0: always the likeliest token.",
        panel=_PANEL,
        metavar="X",
    ),
]
TopK = Annotated[
    int, flag("--top-k", text="Choose among the N likeliest tokens; 0: all.", panel=_PANEL, metavar="N")
]
TopP = Annotated[
    float,
    flag(
        "--top-p",
        text="Choose among the likeliest tokens that together have this probability; 1: all.",
        panel=_PANEL,
        metavar="P",
    ),
]
MinP = Annotated[
    float,
    flag(
        "--min-p",
        text="Drop tokens less than P times as likely as the best; 0: none.",
        panel=_PANEL,
        metavar="P",
    ),
]
Typical = Annotated[
    float,
    flag(
        "--typical",
        "--typical-p",
        text="Choose among the most typical tokens that together have this probability; 1: all.",
        panel=_PANEL,
        metavar="P",
    ),
]
RepeatPenalty = Annotated[
    float,
    flag(
        "--repeat-penalty",
        text="Make recent tokens less likely; 1: off.",
        panel=_PANEL,
        metavar="X",
    ),
]
RepeatLastN = Annotated[
    int,
    flag(
        "--repeat-last-n",
        text="How many tokens the penalties look back; 0: off, -1: the whole context.",
        panel=_PANEL,
        metavar="N",
    ),
]
PresencePenalty = Annotated[
    float,
    flag(
        "--presence-penalty",
        text="Subtract this from the logits of tokens that occurred; 0: off.",
        panel=_PANEL,
        metavar="X",
    ),
]
FrequencyPenalty = Annotated[
    float,
    flag(
        "--frequency-penalty",
        text="Subtract this for each time that a token occurred; 0: off.",
        panel=_PANEL,
        metavar="X",
    ),
]
LogitBias = Annotated[
    list[str] | None,
    flag(
        "-l",
        "--logit-bias",
        text="Make a token more or less likely by its id: 15043+1, 15043-2.5, or 15043-inf to ban it. Can be repeated.",
        panel=_PANEL,
        metavar="ID±X",
    ),
]
Seed = Annotated[
    int,
    flag(
        "-s",
        "--seed",
        text="The same seed gives the same answer; -1: a different one each time.",
        panel=_PANEL,
        metavar="N",
    ),
]

_DEFAULT = SamplingParams()


@dataclass(frozen=True)
class SamplingOptions:
    """The flags that `SamplingParams` takes."""

    temp: Temp = _DEFAULT.temperature
    top_k: TopK = _DEFAULT.top_k
    top_p: TopP = _DEFAULT.top_p
    min_p: MinP = _DEFAULT.min_p
    typical: Typical = _DEFAULT.typical_p
    repeat_penalty: RepeatPenalty = _DEFAULT.repeat_penalty
    repeat_last_n: RepeatLastN = _DEFAULT.repeat_last_n
    presence_penalty: PresencePenalty = _DEFAULT.presence_penalty
    frequency_penalty: FrequencyPenalty = _DEFAULT.frequency_penalty
    logit_bias: LogitBias = None
    seed: Seed = -1

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
