"""The little of JSON Schema that reading raw arguments needs, and what of a schema a grammar can enforce."""

from __future__ import annotations

import json
import re
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


# Keywords that inform a reader and constrain nothing.
_NOTES = frozenset(
    {"title", "description", "examples", "default", "$comment", "deprecated", "readOnly", "writeOnly"}
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # name → schema
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAX_COUNT = 10_000
_MAX_DEPTH = 48
_LOOK_AROUND = re.compile(r"\(\?[=!<P]|\\[1-9kbB]")


def enforceable(schema: object, root: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
    """A schema without notes, and without what no grammar can enforce, so that a tool with an odd schema can be called.

    Left out are patterns with look-around or references, types that do not exist, references that lead nowhere in the
    schema itself, and immense counts.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return schema if isinstance(schema, bool) else {}
    root = schema if root is None else root
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NOTES or (key in _COUNTS and not _is_count(value)):
            continue
        if key == "type":
            kinds = [value] if isinstance(value, str) else value if isinstance(value, list) else []
            kinds = [kind for kind in kinds if isinstance(kind, str) and kind in _ALL]
            if kinds:
                made[key] = kinds[0] if len(kinds) == 1 else kinds
        elif key == "$ref":
            if not _resolves(value, root):
                return {}
            made[key] = value
        elif key == "pattern":
            if _is_regular(value):
                made[key] = value
        elif key == "required":
            if isinstance(value, list):
                made[key] = [name for name in value if isinstance(name, str)]
        elif key in _BY_NAME and isinstance(value, Mapping):
            is_patterns = key == "patternProperties"
            made[key] = {
                str(name): enforceable(child, root, depth + 1)
                for name, child in value.items()
                if not is_patterns or _is_regular(name)
            }
        elif key in _LISTS and isinstance(value, list):
            made[key] = [enforceable(child, root, depth + 1) for child in value]
        elif key in (
            "items",
            "additionalProperties",
            "not",
            "if",
            "then",
            "else",
            "contains",
            "propertyNames",
        ):
            made[key] = enforceable(value, root, depth + 1)
        elif key not in _BY_NAME and key not in _LISTS:
            made[key] = value
    return made


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT


def _is_regular(pattern: object) -> bool:
    if not isinstance(pattern, str) or len(pattern) > 1000 or _LOOK_AROUND.search(pattern):
        return False
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _resolves(reference: object, root: Mapping[str, Any]) -> bool:
    if reference == "#":
        return True
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return False
    target: object = root
    for step in reference[2:].split("/"):
        if not isinstance(target, Mapping) or step not in target:
            return False
        target = target[step]
    return isinstance(target, Mapping | bool)
