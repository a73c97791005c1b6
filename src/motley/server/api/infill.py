"""POST /infill: complete the text between a prefix and a suffix."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from motley.server.api.llama import complete_prompts
from motley.server.errors import invalid, not_supported
from motley.server.fields import Fields
from motley.server.front import Front
from motley.server.prompts import encode, read_prompt

_SNIPPET = "\n\n--- snippet ---\n\n"  # between files, for vocabularies without a token for that
_REPOSITORY = "myproject\n"


async def infill(front: Front, request: Request) -> Response:
    body = await front.body(request)
    tokens = await _tokens(front, body)
    return await complete_prompts(front, request, body, [tuple(tokens)], False)


async def _tokens(front: Front, body: Fields) -> list[int]:
    """[REP] repository, [SEP] file … for each extra file, then [PRE] prefix prompt [SUF] suffix [MID].

    What is next to the gap matters most: prefix and suffix are cut at their far ends to a batch, and extra files to
    what the context leaves.
    """
    model = front.model
    fim = model.fim
    if missing := [name for name in ("pre", "suf", "mid") if name not in fim]:
        raise not_supported(f"this model cannot fill in: it has no token for {', '.join(missing)}")
    prefix = await _text(body, "input_prefix", front)
    suffix = await _text(body, "input_suffix", front)
    prompt = await _plain(body.text("prompt", "") or "", front)
    extra = await _extra(body, front)
    n_batch, n_ctx = front.engine.info["n_batch"], front.n_ctx
    n_batch = min(n_batch, n_ctx // 2)
    prefix = prefix[-3 * (n_batch // 4) :]
    suffix = suffix[: max(0, n_batch // 4 - 2 - len(prompt))]
    n_extra = max(0, n_ctx - n_batch - 2 * max(0, front.settings.n_predict))
    start = (
        [model.tokenizer.bos_id] if model.tokenizer.adds_bos and model.tokenizer.bos_id is not None else []
    )
    kept = extra[len(extra) - min(n_extra, len(extra)) :]
    return [*start, *kept, fim["pre"], *prefix, *prompt, fim["suf"], *suffix, fim["mid"]]


async def _extra(body: Fields, front: Front) -> list[int]:
    fim = front.model.fim
    chunks = body.items("input_extra") or []
    tokens: list[int] = []
    if "rep" in fim:
        tokens += [fim["rep"], *await _plain(_REPOSITORY, front)]
    for index, chunk in enumerate(chunks):
        name, text = _chunk(chunk, index)
        if "sep" in fim:
            tokens += [fim["sep"], *await _plain(f"{name}\n", front)]
        else:
            tokens += await _plain(_SNIPPET, front)
        tokens += await _plain(text, front)
    if "sep" in fim:
        tokens += [fim["sep"], *await _plain("filename\n", front)]
    return tokens


def _chunk(chunk: Any, index: int) -> tuple[str, str]:
    where = f"input_extra[{index}]"
    if not isinstance(chunk, dict) or not isinstance(chunk.get("text"), str):
        raise invalid(f"{where} must have a text", param="input_extra")
    name = chunk.get("filename")
    if name is not None and not isinstance(name, str):
        raise invalid(f"{where}.filename must be a string", param="input_extra")
    return name or "tmp", chunk["text"]


async def _text(body: Fields, name: str, front: Front) -> list[int]:
    value = body.raw(name)
    if value is None:
        raise invalid(f"{name} is missing", param=name)
    if isinstance(value, str):
        return await _plain(value, front)
    return await read_prompt(value, front.model, where=name)


async def _plain(text: str, front: Front) -> list[int]:
    """Text of the user: special tokens in it are text."""
    return await encode(text, front.model, add_special=False, parse_special=False) if text else []
