"""Checks of a request's parameters: numbers of any type become plain ones, wrong values are named."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real

from motley.errors import RequestError
from motley.integers import as_int

MAX_BIAS = 1e30  # beyond every logit; float32 holds sums of it
_MAX_INT = 2**63 - 1  # the largest integer of arrays and native code


def set_float(
    params: object,
    name: str,
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
) -> None:
    value = getattr(params, name)
    number = _as_float(value)
    if number is None or not math.isfinite(number) or not _is_within(number, low, high, open_low):
        raise rejected(name, value, _range("a number", low, high, open_low))
    object.__setattr__(params, name, number)


def set_int(params: object, name: str, *, low: int, high: int = _MAX_INT) -> None:
    value = getattr(params, name)
    number = as_int(value)
    if number is None or not low <= number <= high:
        is_below = high == _MAX_INT and (
            number is None or number < low
        )  # the high limit is only said to those above
        raise rejected(name, value, _range("an integer", low, None if is_below else high))
    object.__setattr__(params, name, number)


def set_count_of_model(params: object, name: str, *, what: str) -> None:
    """An integer whose range the model decides, when a request is made for it."""
    value = getattr(params, name)
    number = as_int(value)
    if number is None or abs(number) > _MAX_INT:
        raise rejected(name, value, f"an integer from 1 to the model's number of {what}")
    object.__setattr__(params, name, number)


def clamp(params: object, name: str, low: float, high: float) -> None:
    object.__setattr__(params, name, max(low, min(high, getattr(params, name))))


def checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise rejected("logit_bias", bias, "a mapping from token id to a number")
    ids = [_checked_id("logit_bias", token) for token in bias]
    values = [_as_float(value) for value in bias.values()]
    if not all(value is not None and value < math.inf for value in values):  # NaN is not < inf either
        raise rejected("logit_bias", bias, "a mapping from token id to a finite number, or -inf")
    clamped = (max(-MAX_BIAS, min(MAX_BIAS, v)) if v != -math.inf else v for v in values if v is not None)
    return dict(zip(ids, clamped, strict=True))


def checked_strings(name: str, given: str | Iterable[str]) -> tuple[str, ...]:
    try:
        strings = (given,) if isinstance(given, str) else tuple(given)
    except TypeError:  # an array of no dimension is an Iterable, too
        raise rejected(name, given, "a string or several") from None
    if not all(isinstance(string, str) and string for string in strings):
        raise rejected(name, given, "a string or several, none of them empty")
    return strings


def checked_ids(name: str, ids: Iterable[int]) -> frozenset[int]:
    try:
        tokens = iter(ids)
    except TypeError:  # an array of no dimension is an Iterable, too
        raise rejected(name, ids, "a collection of token ids") from None
    return frozenset(_checked_id(name, token) for token in tokens)


def _checked_id(name: str, token: object) -> int:
    number = as_int(token)
    if number is None or not 0 <= number <= _MAX_INT:
        raise rejected(name, token, "made of token ids, integers >= 0")
    return number


def _as_float(value: object) -> float | None:
    """The value as a float; None if it is not a number or does not fit into a float."""
    if type(value) is float:  # nearly always; what follows is slow
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):
        return None


def _is_within(value: float, low: float | None, high: float | None, open_low: bool = False) -> bool:
    above = low is None or (value > low if open_low else value >= low)
    return above and (high is None or value <= high)


def _range(kind: str, low: float | None, high: float | None, open_low: bool = False) -> str:
    if low is None:
        return kind
    if high is None:
        return f"{kind} {'>' if open_low else '>='} {low}"
    return f"{kind} from {low} to {high}"


def rejected(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name}={shorten(value)} is not possible", hint=f"{name} must be {allowed}")


def shorten(value: object) -> str:
    """At most 60 characters of `repr(value)`; also works if `repr` fails, as for 10**10000."""
    try:
        return f"{value!r:.60}"
    except Exception:
        return f"a {type(value).__name__}"
