"""What a request may ask of the sampler, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real

from motley.errors import RequestError

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. The names and defaults are llama.cpp's.

    `temperature=0` is greedy. A filter is off at `top_k=0`, `top_p=1`, `min_p=0`, `typical_p=1`; a penalty at
    `repeat_penalty=1`, `frequency_penalty=0`, `presence_penalty=0`. The penalties look at the last
    `repeat_last_n` tokens (0: none, -1: all). `logit_bias` adds to logits by token id; -inf bans a token.
    `context_shift`: a full context does not end the answer; its first `n_keep` tokens are kept (-1: the prompt),
    half of the others are dropped, and it goes on for `max_tokens`, or for ever.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: different every time
    max_tokens: int | None = None  # None: until the context is full
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    context_shift: bool = False
    n_keep: int = 4

    def __post_init__(self) -> None:
        _check_number(self, "temperature", low=0)
        _check_integer(self, "top_k", low=0)
        for name in ("top_p", "min_p", "typical_p"):
            _check_number(self, name, low=0, high=1)
        _check_number(self, "repeat_penalty", low=0, open_low=True)
        _check_integer(self, "repeat_last_n", low=-1)
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(self, name)
        if self.seed is not None:
            _check_integer(self, "seed", low=0, high=_MAX_SEED)
        if self.max_tokens is not None:
            _check_integer(self, "max_tokens", low=1)
        _check_integer(self, "n_keep", low=-1)
        for name in ("ignore_eos", "context_shift"):
            if not isinstance(getattr(self, name), bool):
                raise _rejected(name, getattr(self, name), "true or false")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def with_stops(self, stops: Iterable[str]) -> SamplingParams:
        """The same, with more stop strings."""
        return replace(self, stop=tuple(dict.fromkeys((*self.stop, *stops))))


def _check_number(
    params: SamplingParams,
    name: str,
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
) -> None:
    value = getattr(params, name)
    if not _is_number(value) or not math.isfinite(value) or not _is_within(value, low, high, open_low):
        raise _rejected(name, value, _range("a number", low, high, open_low))


def _check_integer(params: SamplingParams, name: str, *, low: int, high: int | None = None) -> None:
    value = getattr(params, name)
    if not _is_integer(value) or not _is_within(value, low, high):
        raise _rejected(name, value, _range("an integer", low, high))


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise _rejected("logit_bias", bias, "a mapping from token id to a number")
    _checked_ids("logit_bias", bias)
    if not all(_is_number(value) and value < math.inf for value in bias.values()):  # NaN is not < inf either
        raise _rejected("logit_bias", bias, "a mapping from token id to a finite number, or -inf")
    return dict(bias)


def _checked_stop(stop: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(stop, Iterable):
        raise _rejected("stop", stop, "a string or several")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(string, str) and string for string in strings):
        raise _rejected("stop", stop, "a string or several, none of them empty")
    return strings


def _checked_ids(name: str, ids: Iterable[int]) -> frozenset[int]:
    if not isinstance(ids, Iterable):
        raise _rejected(name, ids, "a collection of token ids")
    checked = tuple(ids)
    for token in checked:
        if not _is_integer(token) or token < 0:
            raise _rejected(name, token, "made of token ids, integers >= 0")
    return frozenset(checked)


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _is_integer(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _is_within(value: float, low: float | None, high: float | None, open_low: bool = False) -> bool:
    above = low is None or (value > low if open_low else value >= low)
    return above and (high is None or value <= high)


def _range(kind: str, low: float | None, high: float | None, open_low: bool = False) -> str:
    if low is None:
        return kind
    if high is None:
        return f"{kind} {'>' if open_low else '>='} {low}"
    return f"{kind} from {low} to {high}"


def _rejected(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name}={value!r} is not possible", hint=f"{name} must be {allowed}")
