"""/props, /slots and /metrics: what the server is and does. All from what the front knows: the engine is not asked."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from motley import __version__
from motley.server.errors import ApiError, invalid, not_supported
from motley.server.fields import Fields
from motley.server.front import Front
from motley.server.replies import JSON
from motley.server.sampling import Sampling, generation_settings, read_sampling
from motley.server.security import HeaderName
from motley.server.slots import Slot

_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


async def props(front: Front, request: Request) -> Response:
    settings, model = front.settings, front.model
    defaults = generation_settings(read_sampling(Fields({}), model, settings), model, front.drafters)
    return JSON(
        {
            "default_generation_settings": {"params": defaults, "n_ctx": front.n_ctx},
            "total_slots": len(front.engine.slots.all),
            "model_alias": settings.model_name,
            "model_path": str(settings.model),
            "modalities": {"vision": False, "audio": False, "video": False},
            "endpoint_slots": settings.has_slots,
            "endpoint_props": False,
            "endpoint_metrics": settings.has_metrics,
            "ui": settings.has_page,
            "chat_template": model.template.source,
            "chat_template_caps": _template_caps(model.template.source),
            "bos_token": _token_text(front, model.tokenizer.bos_id),
            "eos_token": _token_text(front, model.tokenizer.eos_id),
            "build_info": f"motley-{__version__}",
            "is_sleeping": False,
        }
    )


async def slots(front: Front, request: Request) -> Response:
    if not front.settings.has_slots:
        raise not_supported("this server does not show slots; start it with --slots")
    front.engine.require_ready()
    if request.query_params.get("fail_on_no_slot") and not front.engine.slots.n_free:
        raise ApiError(503, "no slot available")
    return JSON([_show_slot(front, slot) for slot in front.engine.slots.all])


async def slot_action(front: Front, request: Request) -> Response:
    """save, restore, erase."""
    folder = front.settings.slot_save_path
    if folder is None:
        raise not_supported("slots cannot be saved here; start the server with --slot-save-path")
    front.engine.require_ready()
    slot = _slot(front, request.path_params["slot"])
    body = await front.body(request)
    match request.query_params.get("action"):
        case "save":
            return await _save(front, slot, _path(folder, body))
        case "restore":
            return await _restore(front, slot, _path(folder, body))
        case "erase":
            n_tokens = len(slot.tokens)
            if slot.tokens:
                await front.engine.call("erase", tokens=slot.tokens, prefix=slot.prefix)
            slot.remember([])
            return JSON({"id_slot": slot.number, "n_erased": n_tokens})
    raise invalid("action must be save, restore or erase", param="action")


async def metrics(front: Front, request: Request) -> Response:
    if not front.settings.has_metrics:
        raise not_supported("this server has no metrics; start it with --metrics")
    engine = front.engine
    text = front.metrics.render(engine.stats, n_busy=engine.slots.n_busy, n_deferred=engine.slots.n_deferred)
    reply = PlainTextResponse(text, media_type="text/plain; version=0.0.4")
    started = str(int(front.metrics.started)).encode()
    reply.raw_headers.append((HeaderName(b"Process-Start-Time-Unix"), started))
    return reply


async def _save(front: Front, slot: Slot, path: Path) -> Response:
    if not slot.tokens:
        raise invalid(f"slot {slot.number} is empty")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    saved = await front.engine.call("save", path=str(partial), tokens=slot.tokens)
    os.replace(partial, path)  # a link in the place of the file is replaced, not followed
    return JSON(
        {
            "id_slot": slot.number,
            "filename": path.name,
            "n_saved": saved["n_tokens"],
            "n_written": saved["n_bytes"],
            "timings": {"save_ms": 1000 * saved["seconds"]},
        }
    )


async def _restore(front: Front, slot: Slot, path: Path) -> Response:
    if path.is_symlink() or not path.is_file():
        raise invalid(f"there is no saved slot {path.name}", param="filename")
    restored = await front.engine.call("restore", path=str(path))
    slot.remember(restored["tokens"])
    return JSON(
        {
            "id_slot": slot.number,
            "filename": path.name,
            "n_restored": len(slot.tokens),
            "n_read": path.stat().st_size,
            "timings": {"restore_ms": 1000 * restored["seconds"]},
        }
    )


def _path(folder: Path, body: Fields) -> Path:
    """A file in the folder, by its name: never a path."""
    name = body.text("filename")
    if name is None or not _FILE_NAME.fullmatch(name) or name.startswith("."):
        raise invalid("filename must be a name of letters, digits, '.', '_' and '-'", param="filename")
    return folder / name


def _slot(front: Front, number: str) -> Slot:
    slots = front.engine.slots.all
    if not number.isdecimal() or not number.isascii() or int(number) >= len(slots):
        raise invalid(f"there are slots 0 to {len(slots) - 1}")
    return slots[int(number)]


def _show_slot(front: Front, slot: Slot) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": slot.number,
        "n_ctx": front.n_ctx,
        "speculative": bool(front.drafters),
        "is_processing": slot.request is not None,
    }
    if slot.job is not None:
        sampling = Sampling(
            slot.job.params, -1 if slot.job.params.max_tokens is None else slot.job.params.max_tokens
        )
        n_max = slot.job.params.max_tokens
        shown |= {
            "id_task": slot.request,
            "n_prompt_tokens": len(slot.job.tokens),
            "params": generation_settings(sampling, front.model, front.drafters),
            "next_token": [
                {
                    "has_next_token": True,
                    "n_remain": -1 if n_max is None else n_max - slot.n_decoded,
                    "n_decoded": slot.n_decoded,
                }
            ],
        }
    return shown


def _template_caps(source: str) -> dict[str, bool]:
    return {
        "supports_tools": "tools" in source,
        "supports_tool_calls": "tool_calls" in source,
        "supports_system_role": "system" in source,
        "supports_parallel_tool_calls": "tool_calls" in source,
        "supports_preserve_reasoning": "reasoning_content" in source,
    }


def _token_text(front: Front, token: int | None) -> str:
    return "" if token is None else front.model.tokenizer.token_text(token)
