"""The sampling parameters of a request, checked when they are created."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any

from motley.engine.drafting.choice import MAX_DRAFT
from motley.errors import RequestError
from motley.grammar import Constraint, read_constraint

_MAX_SEED = 2**64 - 1
_MAX_LOGPROBS = 1000
_MAX_CHOICES = 128
_MAX_BIAS = 1e30  # beyond every logit; float32 holds sums of it
_MAX_SALT = 1024  # characters
_MAX_INT = 2**63 - 1  # the largest integer of arrays and native code


_FLAGS = (
    "ignore_eos",
    "context_shift",
    "parse_special",
    "json_object",
    "post_sampling_probs",
    "cache_prompt",
)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. The names and defaults are llama.cpp's.

    `temperature=0` is greedy. A filter is off at `top_k=0`, `top_p=1`, `min_p=0`, `typical_p=1`; a penalty at
    `repeat_penalty=1`, `frequency_penalty=0`, `presence_penalty=0`. The penalties count the last
    `repeat_last_n` tokens (0: none, -1: all). `logit_bias` adds to logits by token id; -inf bans a token.
    `context_shift`: a full context does not end the answer; its first `n_keep` tokens are kept (-1: the prompt),
    half of the others are dropped, and the answer continues up to `max_tokens`, or without end.
    `parse_special`: "<|im_end|>" in a prompt means the token; pass False for text that is not trusted. (In a chat this
    is not necessary: only the template's own text can become a control token.)
    `n_expert_used`: experts of each token, fewer or more than in the model file. `n_layer_exit`: only the first
    `n_layer_exit` layers run. None: the value given to `LLM(…)`, by default that of the model file.
    `speculative`: which drafters guess the next tokens, so that a step may give several: "off", "auto", "lookup", …
    `draft_max`: the most tokens of a draft. They change the speed, never the text. None: the value given to `LLM(…)`.

    At most one of these constrains the answer: `json_schema` (a mapping, or JSON text), `json_object=True` (any JSON
    object), `regex` (of the whole answer), `grammar` (GBNF or Lark). With `grammar_triggers`, text is free until one of
    these strings has been generated; the grammar begins with it.
    `logprobs`: for each token its log-probability and those of the N likeliest, of the model's own distribution; with
    `post_sampling_probs`, of the one that the token was drawn from.

    `n`: answers to one prompt, which is computed once; with a seed, answer 0 is that of the seed, and the others have
    seeds derived from it. `min_tokens`: no end or stop token before. `max_seconds`: of generating, from the first token
    on. `cache_prompt=False`: nothing is taken from the prefix cache. `cache_salt`: prefixes are shared only among
    requests with the same salt.
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
    parse_special: bool = True
    n_expert_used: int | None = None
    n_layer_exit: int | None = None
    json_schema: Mapping[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    grammar_triggers: tuple[str, ...] = ()
    logprobs: int | None = None
    post_sampling_probs: bool = False
    speculative: str | None = None
    draft_max: int | None = None
    n: int = 1
    min_tokens: int = 0
    max_seconds: float | None = None
    cache_prompt: bool = True
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        """Checks all values and converts every number to a plain float or int, whatever number type was passed."""
        _set_float(self, "temperature", low=0)
        _set_int(self, "top_k", low=0)
        for name in ("top_p", "min_p", "typical_p"):
            _set_float(self, name, low=0, high=1)
        _set_float(self, "repeat_penalty", low=0, open_low=True)
        _set_int(self, "repeat_last_n", low=-1)
        for name in ("frequency_penalty", "presence_penalty"):
            _set_float(self, name)
            _clamp(self, name, -_MAX_BIAS, _MAX_BIAS)
        _clamp(self, "repeat_penalty", 1e-6, 1e6)
        if self.seed is not None:
            _set_int(self, "seed", low=0, high=_MAX_SEED)
        if self.max_tokens is not None:
            _set_int(self, "max_tokens", low=1)
        _set_int(self, "n_keep", low=-1)
        for name in ("n_expert_used", "n_layer_exit"):
            if getattr(self, name) is not None:
                _set_int(self, name, low=1)
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise _rejected(name, getattr(self, name), "a string")
        if not isinstance(self.json_schema, Mapping | bool | str | None):
            raise _rejected("json_schema", self.json_schema, "a mapping, or JSON text")
        if self.logprobs is not None:
            _set_int(self, "logprobs", low=0, high=_MAX_LOGPROBS)
        if self.draft_max is not None:
            _set_int(self, "draft_max", low=1, high=MAX_DRAFT)
        if self.speculative is not None and not isinstance(self.speculative, str):
            raise _rejected("speculative", self.speculative, "text: off, auto, or drafters by comma")
        self._check_limits()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _rejected(name, getattr(self, name), "true or false")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_strings("stop", self.stop))
        triggers = _checked_strings("grammar_triggers", self.grammar_triggers)
        object.__setattr__(self, "grammar_triggers", triggers)
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))

    def _check_limits(self) -> None:
        _set_int(self, "n", low=1, high=_MAX_CHOICES)
        _set_int(self, "min_tokens", low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _rejected("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.max_seconds is not None:
            _set_float(self, "max_seconds", low=0, open_low=True)
        salt = self.cache_salt
        if not isinstance(salt, str | None) or len(salt or "") > _MAX_SALT:
            raise _rejected("cache_salt", salt, f"a string of at most {_MAX_SALT} characters")

    def choices(self) -> list[SamplingParams]:
        """The parameters of each of the `n` answers."""
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else _derived(self.seed, i) for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is on."""
        is_on = self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return is_on and self.repeat_last_n != 0

    def constraint(self) -> Constraint | None:
        """What the answer must match, checked but not compiled; None: nothing."""
        return read_constraint(
            json_schema=self.json_schema,
            json_object=self.json_object,
            grammar=self.grammar,
            regex=self.regex,
            grammar_triggers=self.grammar_triggers,
        )

    def with_stops(self, stops: Iterable[str]) -> SamplingParams:
        """A copy with more stop strings."""
        return replace(self, stop=tuple(dict.fromkeys((*self.stop, *stops))))


def _derived(seed: int, i: int) -> int:
    """The seed of answer `i`; of answer 0 it is `seed` itself."""
    if i == 0:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + i.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _set_float(
    params: SamplingParams,
    name: str,
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
) -> None:
    value = getattr(params, name)
    number = _as_float(value)
    if number is None or not math.isfinite(number) or not _is_within(number, low, high, open_low):
        raise _rejected(name, value, _range("a number", low, high, open_low))
    object.__setattr__(params, name, number)


def _set_int(params: SamplingParams, name: str, *, low: int, high: int = _MAX_INT) -> None:
    value = getattr(params, name)
    number = _as_int(value)
    if number is None or not low <= number <= high:
        raise _rejected(name, value, _range("an integer", low, None if high == _MAX_INT else high))
    object.__setattr__(params, name, number)


def _clamp(params: SamplingParams, name: str, low: float, high: float) -> None:
    object.__setattr__(params, name, max(low, min(high, getattr(params, name))))


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise _rejected("logit_bias", bias, "a mapping from token id to a number")
    ids = [_checked_id("logit_bias", token) for token in bias]
    values = [_as_float(value) for value in bias.values()]
    if not all(value is not None and value < math.inf for value in values):  # NaN is not < inf either
        raise _rejected("logit_bias", bias, "a mapping from token id to a finite number, or -inf")
    clamped = (max(-_MAX_BIAS, min(_MAX_BIAS, v)) if v != -math.inf else v for v in values if v is not None)
    return dict(zip(ids, clamped, strict=True))


def _checked_strings(name: str, given: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(given, Iterable):
        raise _rejected(name, given, "a string or several")
    strings = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(string, str) and string for string in strings):
        raise _rejected(name, given, "a string or several, none of them empty")
    return strings


def _checked_ids(name: str, ids: Iterable[int]) -> frozenset[int]:
    if not isinstance(ids, Iterable):
        raise _rejected(name, ids, "a collection of token ids")
    return frozenset(_checked_id(name, token) for token in ids)


def _checked_id(name: str, token: object) -> int:
    number = _as_int(token)
    if number is None or not 0 <= number <= _MAX_INT:
        raise _rejected(name, token, "made of token ids, integers >= 0")
    return number


def _as_float(value: object) -> float | None:
    """The value as a float; None if it is not a number or does not fit into a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):
        return None


def _as_int(value: object) -> int | None:
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


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
    return RequestError(f"{name}={shorten(value)} is not possible", hint=f"{name} must be {allowed}")


def shorten(value: object) -> str:
    """At most 60 characters of `repr(value)`; also works if `repr` fails, as for 10**10000."""
    try:
        return f"{value!r:.60}"
    except Exception:
        return f"a {type(value).__name__}"
