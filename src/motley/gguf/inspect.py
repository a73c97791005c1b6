"""What a model file holds, as plain data that `json.dumps` takes and a table can show."""

from __future__ import annotations

from typing import Any

from motley.gguf.spec import ModelSpec


def describe(spec: ModelSpec) -> dict[str, Any]:
    """The contents of a model."""
    return {"path": str(spec.path), "architecture": spec.metadata.str("general.architecture", None)}
