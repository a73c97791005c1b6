"""The little of JSON Schema that reading raw arguments needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_ALL = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


def types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; all where it does not say."""
    if not isinstance(schema, Mapping) or depth > 20:
        return _ALL
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: object = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        return types_of(target, root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(str(item) for item in kind)
    if isinstance(values := schema.get("enum"), list):
        return frozenset(_type(value) for value in values)
    if "const" in schema:
        return frozenset({_type(schema["const"])})
    for word in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(word), list):
            return frozenset().union(*(types_of(option, root, depth + 1) for option in options))
    return _ALL


def value_from_text(text: str, types: frozenset[str]) -> str:
    """Raw text as JSON of one of the types; as a JSON string where it is nothing else."""
    try:
        value = json.loads(text)
        json.dumps(value).encode()  # a lone surrogate is no text
    except (ValueError, RecursionError):
        value = text.strip()
        if value in ("True", "False", "None") and types & {"boolean", "null"}:
            return {"True": "true", "False": "false", "None": "null"}[value]
        return json.dumps(text, ensure_ascii=False)
    kind = _type(value)
    is_allowed = kind in types or (kind == "integer" and "number" in types)
    if (kind == "string" or not is_allowed) and "string" in types and kind != "null":
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and types != _ALL and not (kind == "null" and "null" in types):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _type(value: object) -> str:
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"
