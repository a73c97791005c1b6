"""The sampling parameters of a request, checked when they are created."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

from motley.engine.checks import (
    MAX_BIAS,
    checked_bias,
    checked_ids,
    checked_strings,
    clamp,
    rejected,
    set_count_of_model,
    set_float,
    set_int,
)
from motley.engine.drafting.choice import MAX_DRAFT
from motley.grammar import Constraint, read_constraint

_MAX_SEED = 2**64 - 1
_MAX_LOGPROBS = 1000
_MAX_CHOICES = 128
_MAX_SALT = 1024  # characters


SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_ALIASES = {"typical_p": "typ_p", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "temp": "temperature"}
_IGNORED = ("infill", "adaptive_p", "tfs_z")  # samplers of llama.cpp that change nothing here
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

    Further samplers, each off by default: `top_n_sigma` (keep logits within n standard deviations of the best), xtc,
    dynatemp, `mirostat` (1 or 2, in place of all filters), dry; `min_keep`: candidates that each filter leaves;
    `samplers`: which of them run, and in which order. Penalties and dry always come first.

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
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    min_keep: int = 0
    samplers: tuple[str, ...] = SAMPLERS

    def __post_init__(self) -> None:
        """Checks all values and converts every number to a plain float or int, whatever number type was passed.

        Defaults need no check: most requests set few values, and thousands of them come in a second.
        """
        defaults = SamplingParams.__dict__
        for name, value in tuple(self.__dict__.items()):
            if name not in defaults or value is not defaults[name]:
                for check in _CHECKS[name]:
                    check(self, name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise rejected("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")

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
        if "penalties" not in self.samplers:
            return False
        is_on = self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return is_on and self.repeat_last_n != 0

    def constraint(self) -> Constraint | None:
        """The constraint that the answer must match, checked but not compiled; None: there is none."""
        return read_constraint(
            json_schema=self.json_schema,
            json_object=self.json_object,
            grammar=self.grammar,
            regex=self.regex,
            grammar_triggers=self.grammar_triggers,
        )

    def with_stops(self, stops: Iterable[str]) -> SamplingParams:
        """The same with more stop strings."""
        if not (stops := tuple(stops)):
            return self
        return replace(self, stop=tuple(dict.fromkeys((*self.stop, *stops))))


_Check = Callable[[SamplingParams, str], None]


def _number(**limits: Any) -> _Check:
    return partial(set_float, **limits)


def _integer(**limits: Any) -> _Check:
    return partial(set_int, **limits)


def _within(low: float, high: float) -> _Check:
    return lambda params, name: clamp(params, name, low, high)


def _optional(check: _Check) -> _Check:
    def check_given(params: SamplingParams, name: str) -> None:
        if getattr(params, name) is not None:
            check(params, name)

    return check_given


def _one_of(kinds: Any, allowed: str) -> _Check:
    def check_kind(params: SamplingParams, name: str) -> None:
        if not isinstance(value := getattr(params, name), kinds):
            raise rejected(name, value, allowed)

    return check_kind


def _converted(convert: Callable[[str, Any], Any]) -> _Check:
    """`convert` checks and returns a value."""
    return lambda params, name: object.__setattr__(params, name, convert(name, getattr(params, name)))


def _salt(name: str, salt: Any) -> Any:
    if not isinstance(salt, str | None) or len(salt or "") > _MAX_SALT:
        raise rejected(name, salt, f"a string of at most {_MAX_SALT} characters")
    return salt


def _sampler_names(name: str, given: Any) -> tuple[str, ...]:
    names = checked_strings(name, given)
    order = tuple(_ALIASES.get(each, each) for each in names if each not in _IGNORED)
    if unknown := [each for each in order if each not in SAMPLERS]:
        raise rejected(name, unknown[0], f"some of {', '.join(SAMPLERS)}")
    return tuple(dict.fromkeys(order))


_FRACTION, _FROM_ZERO, _COUNT = _number(low=0, high=1), _number(low=0), _integer(low=0)
_FLAG = _one_of(bool, "true or false")
_BIASED = _within(-MAX_BIAS, MAX_BIAS)

# What is checked of a value that is not the default.
_CHECKS: Mapping[str, tuple[_Check, ...]] = {
    "temperature": (_FROM_ZERO,),
    "top_k": (_COUNT,),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"), (_FRACTION,)),
    "repeat_penalty": (_number(low=0, open_low=True), _within(1e-6, 1e6)),
    **dict.fromkeys(("repeat_last_n", "n_keep", "dry_penalty_last_n"), (_integer(low=-1),)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (_number(), _BIASED)),
    "logit_bias": (_converted(lambda name, bias: checked_bias(bias)),),
    "seed": (_optional(_integer(low=0, high=_MAX_SEED)),),
    "max_tokens": (_optional(_integer(low=1)),),
    "n_expert_used": (_optional(partial(set_count_of_model, what="experts")),),
    "n_layer_exit": (_optional(partial(set_count_of_model, what="layers")),),
    **dict.fromkeys(("stop", "grammar_triggers", "dry_sequence_breakers"), (_converted(checked_strings),)),
    "stop_token_ids": (_converted(checked_ids),),
    **dict.fromkeys(_FLAGS, (_FLAG,)),
    **dict.fromkeys(("regex", "grammar"), (_one_of(str | None, "a string"),)),
    "json_schema": (_one_of(Mapping | bool | str | None, "a mapping, or JSON text"),),
    "logprobs": (_optional(_integer(low=0, high=_MAX_LOGPROBS)),),
    "speculative": (_one_of(str | None, "text: off, auto, or drafters separated by commas"),),
    "draft_max": (_optional(_integer(low=1, high=MAX_DRAFT)),),
    "n": (_integer(low=1, high=_MAX_CHOICES),),
    **dict.fromkeys(("min_tokens", "dry_allowed_length", "min_keep"), (_COUNT,)),
    "max_seconds": (_optional(_number(low=0, open_low=True)),),
    "cache_salt": (_converted(_salt),),
    "top_n_sigma": (_number(), _BIASED),
    **dict.fromkeys(
        ("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "dynatemp_range", "dry_base"), (_FROM_ZERO,)
    ),
    "mirostat": (_integer(low=0, high=2),),
    "dry_multiplier": (_FROM_ZERO, _within(0, MAX_BIAS)),
    "samplers": (_converted(_sampler_names),),
}


def _derived(seed: int, i: int) -> int:
    """The seed of answer `i`; of answer 0 it is `seed` itself."""
    if i == 0:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + i.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
