"""Fields of a request → SamplingParams, and SamplingParams → llama-server's `generation_settings`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from motley.engine.params import SamplingParams
from motley.errors import RequestError
from motley.server.constraints import read_constraint
from motley.server.errors import invalid, not_supported
from motley.server.fields import Fields, show
from motley.server.model import FrontModel
from motley.server.settings import ServerSettings

_KNOWN = {field.name for field in fields(SamplingParams)}
_RANDOM_SEED = 2**32 - 1  # what llama-server shows for "another one each time"

_FLOATS = (
    *(
        "temperature",
        "top_p",
        "min_p",
        "typical_p",
        "repeat_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
    *(
        "dynatemp_range",
        "dynatemp_exponent",
        "xtc_probability",
        "xtc_threshold",
        "dry_multiplier",
        "dry_base",
    ),
    *("mirostat_tau", "mirostat_eta", "top_n_sigma", "adaptive_target", "adaptive_decay"),
)
_INTS = (
    *("top_k", "repeat_last_n", "n_keep", "min_keep", "dry_allowed_length", "dry_penalty_last_n", "mirostat"),
    *("n_expert_used", "n_layer_exit", "min_tokens", "draft_max"),
)
_BOOLS = ("ignore_eos", "context_shift", "cache_prompt")
_LISTS = ("dry_sequence_breakers", "samplers")
_STRINGS = ("cache_salt", "speculative")

_READERS: dict[str, Callable[[Fields, str], Any]] = {
    **dict.fromkeys(_FLOATS, Fields.number),
    **dict.fromkeys(_INTS, Fields.integer),
    **dict.fromkeys(_BOOLS, Fields.flag),
    **dict.fromkeys(_LISTS, Fields.items),
    **dict.fromkeys(_STRINGS, Fields.text),
}

# llama-server's defaults of what `SamplingParams` may not have. Another value of such a field is refused.
_LLAMA_DEFAULTS: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "min_keep": 0,
    "samplers": [
        *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
    ],
}
# Fields that change nothing if the other one of their feature is off.
_HARMLESS = frozenset(
    [
        "dynatemp_exponent",
        "xtc_threshold",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "mirostat_tau",
        "mirostat_eta",
        "adaptive_decay",
        "min_keep",
        "samplers",
    ]
)


@dataclass(frozen=True)
class Sampling:
    """A request's options for choosing tokens."""

    params: SamplingParams
    n_predict: int  # -1: until the context is full
    n_probs: int = 0
    post_sampling_probs: bool = False
    shown: tuple[tuple[str, Any], ...] = ()  # fields that are only echoed

    @property
    def discards_answer(self) -> bool:
        """The prompt is computed, and nothing is generated."""
        return self.n_predict == 0


def read_sampling(body: Fields, model: FrontModel, settings: ServerSettings, *, n_probs: int = 0) -> Sampling:
    """Reads all sampling fields. 400 for impossible values, 501 for features that the engine does not have."""
    values: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    for name, value in body.values.items():
        if value is not None and (read := _READERS.get(name)) is not None:
            _place(name, read(body, name), values, shown)
    if values.get("temperature", 0) < 0:
        values["temperature"] = 0.0
    if values.get("top_k", 0) < 0:
        values["top_k"] = 0
    if (seed := body.integer("seed")) is not None:
        values["seed"] = None if seed < 0 or seed == _RANDOM_SEED else seed
    values["logit_bias"] = _read_bias(body, model, settings)
    values["stop"] = read_stops(body.raw("stop"), settings)
    values["stop_token_ids"] = frozenset(
        token for token in body.items("stop_token_ids") or () if isinstance(token, int)
    )
    n_predict = _n_predict(body, settings)
    values["max_tokens"] = None if n_predict < 0 else max(1, n_predict)
    if (milliseconds := body.number("t_max_predict_ms")) is not None and milliseconds > 0:
        values["max_seconds"] = milliseconds / 1000
    n_probs = _n_probs(body, settings) or n_probs
    if n_probs:
        values["logprobs"] = n_probs
        values["post_sampling_probs"] = body.flag("post_sampling_probs")
    values |= read_constraint(body)
    try:
        params = SamplingParams(**{**vars(settings.defaults), **values})
    except RequestError as error:
        raise invalid(str(error)) from None
    return Sampling(
        params, n_predict, n_probs, body.flag("post_sampling_probs"), tuple(sorted(shown.items()))
    )


def read_stops(stop: Any, settings: ServerSettings) -> tuple[str, ...]:
    """Stop strings: one or several. Empty ones, which some clients send, are dropped."""
    if stop is None:
        return settings.defaults.stop
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise invalid(f"stop must be a string or a list of strings, not {show(stop)}", param="stop")
    limits = settings.limits
    if len(stops) > limits.n_stops or any(len(text) > limits.stop_chars for text in stops):
        raise invalid(
            f"at most {limits.n_stops} stop strings of at most {limits.stop_chars} characters", param="stop"
        )
    return tuple(text for text in stops if text)


def for_choices(sampling: Sampling, n_choices: int) -> list[SamplingParams]:
    """The parameters of each choice: with seeds of their own."""
    if n_choices == 1 and sampling.params.n == 1:
        return [sampling.params]
    return replace(sampling.params, n=n_choices).choices()


def generation_settings(sampling: Sampling, model: FrontModel, drafters: str, **more: Any) -> dict[str, Any]:
    """The settings of a request, as llama-server echoes them. `drafters`: of requests that do not say."""
    params = sampling.params
    bias = dict(params.logit_bias)
    if params.ignore_eos:
        bias |= dict.fromkeys(sorted(model.tokenizer.eog_ids), -math.inf)
    echoed = dict(sampling.shown)
    types = drafters if params.speculative is None else params.speculative

    def value(name: str) -> Any:
        if name in _KNOWN:
            return getattr(params, name)
        return echoed.get(name, _LLAMA_DEFAULTS.get(name))

    names = (*_FLOATS, *_INTS[:7], *_LISTS)
    return {
        "seed": _RANDOM_SEED if params.seed is None else params.seed,
        **{name: _plain(value(name)) for name in names},
        "stop": list(params.stop),
        "max_tokens": sampling.n_predict,
        "n_predict": sampling.n_predict,
        "n_discard": 0,
        "ignore_eos": params.ignore_eos,
        "logit_bias": [
            {"token": token, "bias": None if bias == -math.inf else bias} for token, bias in bias.items()
        ],
        "n_probs": sampling.n_probs,
        "post_sampling_probs": sampling.post_sampling_probs,
        "grammar": getattr(params, "grammar", None) or "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "speculative.types": "none" if types in ("", "off") else types,
        "timings_per_token": False,
        "backend_sampling": False,
        "lora": [],
        "stream": False,
        **more,
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | frozenset) else value


def _place(name: str, value: Any, values: dict[str, Any], shown: dict[str, Any]) -> None:
    if name in _KNOWN:
        values[name] = value
        return
    if value != _LLAMA_DEFAULTS.get(name) and name not in _HARMLESS:
        raise not_supported(f"{name} is not supported")
    shown[name] = value


def _n_predict(body: Fields, settings: ServerSettings) -> int:
    wanted = next(
        (
            n
            for name in ("n_predict", "max_completion_tokens", "max_tokens")
            if (n := body.integer(name)) is not None
        ),
        None,
    )
    if wanted is None:
        wanted = settings.n_predict
    return max(-1, wanted)


def _n_probs(body: Fields, settings: ServerSettings) -> int:
    n_probs = body.integer("n_probs", 0) or 0
    if not 0 <= n_probs <= settings.limits.n_probs:
        raise invalid(f"n_probs must be from 0 to {settings.limits.n_probs}", param="n_probs")
    return n_probs


def _read_bias(body: Fields, model: FrontModel, settings: ServerSettings) -> dict[int, float]:
    """{"id": x}, [[id, x]], [[text, x]], {"text": x}; false bans a token."""
    given = body.raw("logit_bias")
    if given is None:
        return dict(settings.defaults.logit_bias)
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list):
        raise body.wrong("logit_bias", given, "an object or a list of pairs")
    if len(pairs) > settings.limits.n_biases:
        raise invalid(f"at most {settings.limits.n_biases} biases", param="logit_bias")
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise body.wrong("logit_bias", pair, "made of pairs of a token and a number")
        token, bias = pair
        if bias is False:
            bias = -math.inf
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise body.wrong("logit_bias", bias, "made of numbers, or false")
        for number in _bias_tokens(token, model):
            biases[number] = float(bias)
    return biases


def _bias_tokens(token: Any, model: FrontModel) -> list[int]:
    """An id, or the tokens of a text. An id that is not in the vocabulary is ignored, as llama-server does."""
    if isinstance(token, str):
        try:
            token = int(token)
        except ValueError:
            return model.tokenizer.encode(token, add_special=False)
    if isinstance(token, bool) or not isinstance(token, int):
        raise invalid(f"logit_bias: {show(token)} is no token", param="logit_bias")
    n_vocab = model.tokenizer.n_vocab  # 0: without a tokenizer, the engine checks the ids
    return [token] if token >= 0 and (token < n_vocab or not n_vocab) else []
