"""Checks of the prompts and parameters that callers of `LLM` pass. Imports no torch."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import Any

from motley.engine.checks import shorten
from motley.engine.params import SamplingParams
from motley.errors import ConfigError, MotleyError, RequestError
from motley.text import Tokenizer

ParamsLike = SamplingParams | Mapping[str, Any]


def read_params(params: Any, sampling: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a request: an object, a mapping, or options by name."""
    if params is not None and sampling:
        raise RequestError("give either params or sampling options by name, not both")
    if isinstance(params, SamplingParams):
        return params
    if params is not None and not isinstance(params, Mapping):
        raise RequestError(
            f"params is {shorten(params)}",
            hint="it must be a SamplingParams; of a list of prompts, one for each",
        )
    options = sampling if params is None else params
    known = [field.name for field in fields(SamplingParams)]
    unknown = sorted(str(name) for name in options if name not in known)
    if unknown:
        raise RequestError(f"unknown option {unknown[0]!r}", hint=f"there are: {', '.join(known)}")
    return SamplingParams(**options)


def read_params_of_list(params: Any, sampling: Mapping[str, Any], n_prompts: int) -> list[SamplingParams]:
    """The parameters of each of several prompts: the same for all, or a list."""
    if not isinstance(params, list | tuple):
        return [read_params(params, sampling)] * n_prompts
    if len(params) != n_prompts:
        raise RequestError(
            f"{len(params)} params for {n_prompts} prompts", hint="give one for each, or one for all"
        )
    return [
        at_index("params", i, lambda each=each: read_params(each, sampling)) for i, each in enumerate(params)
    ]


def is_list_of_prompts(prompt: Any) -> bool:
    """Whether it is several prompts, or none; a list of integers is one prompt."""
    return isinstance(prompt, list | tuple) and not (prompt and isinstance(prompt[0], Integral))


def read_prompt(tokenizer: Tokenizer, prompt: Any, parse_special: bool = True) -> list[int]:
    """The token ids of a prompt: text, or token ids."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, parse_special=parse_special)
    wrong = RequestError(
        f"a prompt is text or a list of token ids, not {type(prompt).__name__} {shorten(prompt)}",
        hint="decode bytes first" if isinstance(prompt, bytes | bytearray | memoryview) else None,
    )
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping | Set):
        raise wrong
    try:
        tokens = list(prompt)
        ids = list(map(operator.index, tokens))
    except TypeError:
        raise wrong from None
    if bool in map(type, tokens):
        raise wrong
    return ids


def at_index(what: str, i: int, read: Any) -> Any:
    """The result of `read()`; an error says which element of a list it is about."""
    try:
        return read()
    except MotleyError as error:
        message = f"{what}[{i}]: {error.message}"
        raise type(error)(message, hint=error.hint) from None


def read_path(what: str, path: Any) -> Path:
    """A path given by a caller. ConfigError for what no file can be called."""
    try:
        found = Path(path)
    except TypeError:
        raise ConfigError(f"{what} is {shorten(path)}", hint="it must be the path of a file") from None
    if not str(path) or "\0" in str(found):
        raise ConfigError(f"{what} is {shorten(path)}", hint="no file can have this name")
    return found
