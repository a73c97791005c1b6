"""The sampling parameters of a request, checked when they are created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from motley.engine.checks import (
    MAX_BIAS,
    checked_bias,
    checked_ids,
    checked_strings,
    clamp,
    rejected,
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
        """Checks all values and converts every number to a plain float or int, whatever number type was passed."""
        set_float(self, "temperature", low=0)
        set_int(self, "top_k", low=0)
        for name in ("top_p", "min_p", "typical_p"):
            set_float(self, name, low=0, high=1)
        set_float(self, "repeat_penalty", low=0, open_low=True)
        set_int(self, "repeat_last_n", low=-1)
        for name in ("frequency_penalty", "presence_penalty"):
            set_float(self, name)
            clamp(self, name, -MAX_BIAS, MAX_BIAS)
        clamp(self, "repeat_penalty", 1e-6, 1e6)
        if self.seed is not None:
            set_int(self, "seed", low=0, high=_MAX_SEED)
        if self.max_tokens is not None:
            set_int(self, "max_tokens", low=1)
        set_int(self, "n_keep", low=-1)
        for name in ("n_expert_used", "n_layer_exit"):
            if getattr(self, name) is not None:
                set_int(self, name, low=1)
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise rejected(name, getattr(self, name), "a string")
        if not isinstance(self.json_schema, Mapping | bool | str | None):
            raise rejected("json_schema", self.json_schema, "a mapping, or JSON text")
        if self.logprobs is not None:
            set_int(self, "logprobs", low=0, high=_MAX_LOGPROBS)
        if self.draft_max is not None:
            set_int(self, "draft_max", low=1, high=MAX_DRAFT)
        if self.speculative is not None and not isinstance(self.speculative, str):
            raise rejected(
                "speculative", self.speculative, "text: off, auto, or drafters separated by commas"
            )
        self._check_limits()
        self._check_samplers()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise rejected(name, getattr(self, name), "true or false")
        object.__setattr__(self, "logit_bias", checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", checked_strings("stop", self.stop))
        triggers = checked_strings("grammar_triggers", self.grammar_triggers)
        object.__setattr__(self, "grammar_triggers", triggers)
        object.__setattr__(self, "stop_token_ids", checked_ids("stop_token_ids", self.stop_token_ids))

    def _check_limits(self) -> None:
        set_int(self, "n", low=1, high=_MAX_CHOICES)
        set_int(self, "min_tokens", low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise rejected("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.max_seconds is not None:
            set_float(self, "max_seconds", low=0, open_low=True)
        salt = self.cache_salt
        if not isinstance(salt, str | None) or len(salt or "") > _MAX_SALT:
            raise rejected("cache_salt", salt, f"a string of at most {_MAX_SALT} characters")

    def _check_samplers(self) -> None:
        set_float(self, "top_n_sigma")
        for name in ("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "dry_base"):
            set_float(self, name, low=0)
        for name in ("xtc_probability", "xtc_threshold"):
            set_float(self, name, low=0, high=1)
        set_float(self, "dynatemp_range", low=0)
        set_float(self, "dry_multiplier", low=0)
        clamp(self, "dry_multiplier", 0, MAX_BIAS)
        set_int(self, "mirostat", low=0, high=2)
        set_int(self, "dry_allowed_length", low=0)
        set_int(self, "dry_penalty_last_n", low=-1)
        set_int(self, "min_keep", low=0)
        breakers = checked_strings("dry_sequence_breakers", self.dry_sequence_breakers)
        names = checked_strings("samplers", self.samplers)
        order = tuple(_ALIASES.get(name, name) for name in names if name not in _IGNORED)
        if unknown := [name for name in order if name not in SAMPLERS]:
            raise rejected("samplers", unknown[0], f"some of {', '.join(SAMPLERS)}")
        object.__setattr__(self, "dry_sequence_breakers", breakers)
        object.__setattr__(self, "samplers", tuple(dict.fromkeys(order)))

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
        """What the answer must match, checked but not compiled; None: nothing."""
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


def _derived(seed: int, i: int) -> int:
    """The seed of answer `i`; of answer 0 it is `seed` itself."""
    if i == 0:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + i.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
