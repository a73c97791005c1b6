"""The constraint of an answer: response_format, json_schema, grammar, regex → fields of SamplingParams."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from motley.engine.params import SamplingParams
from motley.errors import MotleyError
from motley.grammar import check_constraint
from motley.server.errors import invalid, of_motley
from motley.server.fields import Fields, show


def read_constraint(body: Fields) -> dict[str, Any]:
    """Fields of SamplingParams; empty if nothing is required of the answer."""
    found: dict[str, Any] = {}
    if (schema := body.raw("json_schema")) is not None:
        found["json_schema"] = schema
    for name in ("grammar", "regex"):
        if text := body.text(name):
            found[name] = text
    if (form := body.mapping("response_format")) is not None:
        found |= _of_format(form)
    if len(found) > 1:
        raise invalid(f"an answer cannot have both {' and '.join(sorted(found)[:2])}")
    return found


def _of_format(form: dict[str, Any]) -> dict[str, Any]:
    match form.get("type"):
        case "text" | None:
            return {}
        case "json_object":
            schema = form.get("schema")
            return {"json_object": True} if schema is None else {"json_schema": _object(schema)}
        case "json_schema":
            described = form.get("json_schema")
            if not isinstance(described, dict):
                raise invalid("response_format.json_schema must be an object", param="response_format")
            schema = described.get("schema")
            return {"json_object": True} if schema is None else {"json_schema": _object(schema)}
    raise invalid(
        f"response_format.type must be text, json_object or json_schema, not {show(form.get('type'))}",
        param="response_format",
    )


def _object(schema: Any) -> Any:
    if not isinstance(schema, dict | bool):
        raise invalid(f"the schema must be an object, not {show(schema)}", param="response_format")
    return schema


def after_thoughts(constraint: dict[str, Any], ends: str) -> dict[str, Any]:
    """The same for an answer that begins inside of thoughts: it holds from their end on."""
    schema = constraint.get("json_schema", {"type": "object"} if constraint.get("json_object") else None)
    if schema is None:
        return constraint  # a grammar of the client's own covers the whole answer
    text = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    lark = f"start: {orjson.dumps(ends).decode()} /\\s*/ json\njson: %json {text}\n"
    return {"grammar": lark, "grammar_triggers": (ends,)}


async def check(params: SamplingParams) -> None:
    """400 for a schema or grammar that cannot be used, before the engine sees it."""
    try:
        constraint = params.constraint()
        if constraint is not None:
            await asyncio.to_thread(check_constraint, constraint)
    except MotleyError as error:
        raise of_motley(error) from None
