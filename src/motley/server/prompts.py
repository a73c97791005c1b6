"""Prompts in all the forms that clients send: text, tokens, both mixed, objects, and lists of these."""

from __future__ import annotations

from typing import Any

from motley.errors import MotleyError
from motley.server.errors import ApiError, context_exceeded, invalid, of_motley
from motley.server.fields import show
from motley.server.model import FrontModel
from motley.server.settings import Limits


async def read_prompts(
    prompt: Any, model: FrontModel, limits: Limits, *, n_ctx: int, where: str = "prompt"
) -> tuple[list[tuple[int, ...]], bool]:
    """The tokens of each prompt, and whether the client sent a list of prompts. 400 for a text that cannot fit."""
    if prompt is None:
        raise invalid(f"{where} is missing", param=where)
    is_list = _is_list_of_prompts(prompt)
    prompts = prompt if is_list else [prompt]
    if len(prompts) > limits.n_prompts:
        raise invalid(f"{len(prompts)} prompts; at most {limits.n_prompts}", param=where)
    return [tuple(await read_prompt(each, model, n_ctx=n_ctx, where=where)) for each in prompts], is_list


async def read_prompt(
    prompt: Any, model: FrontModel, *, n_ctx: int | None = None, where: str = "prompt"
) -> list[int]:
    """The tokens of one prompt."""
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise ApiError(400, "images and audio are not supported by this model")
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str):
        require_chars(len(prompt), model, n_ctx)
        return await encode(prompt, model)
    if not isinstance(prompt, list) or not prompt:
        raise invalid(f"{where} must be text, tokens or a list of these, not {show(prompt)}", param=where)
    if all(type(part) is int for part in prompt):  # checked against the vocabulary by the engine
        return list(prompt)
    require_chars(sum(len(part) for part in prompt if isinstance(part, str)), model, n_ctx)
    tokens: list[int] = []
    for index, part in enumerate(prompt):
        if isinstance(part, str):
            tokens += await encode(part, model, add_special=index == 0)
        elif isinstance(part, int) and not isinstance(part, bool):
            tokens.append(part)
        else:
            raise invalid(f"{where}: {show(part)} is neither text nor a token", param=where)
    return tokens


async def encode(
    text: str, model: FrontModel, *, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    try:
        return await model.in_thread_if_long(
            len(text),
            lambda: model.tokenizer.encode(text, add_special=add_special, parse_special=parse_special),
        )
    except MotleyError as error:
        raise of_motley(error) from None


def require_chars(n_chars: int, model: FrontModel, n_ctx: int | None) -> None:
    """400 for a text that is too long for the context whatever its tokens are: tokenizing it would take long."""
    if n_ctx is not None and (n_tokens := n_chars // model.longest_token) >= n_ctx:
        raise context_exceeded(n_tokens, n_ctx, at_least=True)


def require_room(tokens: tuple[int, ...] | list[int], n_ctx: int) -> None:
    """400 for a prompt that leaves no room for an answer, or has no tokens."""
    if not tokens:
        raise invalid("the prompt is empty")
    if len(tokens) >= n_ctx:
        raise context_exceeded(len(tokens), n_ctx)


def _is_list_of_prompts(prompt: Any) -> bool:
    """A list with a number in it is one prompt; of texts, lists and objects, it is several."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and not any(isinstance(part, int | float) for part in prompt)
    )
