"""One file per architecture, named as `general.architecture`; each builds a graph as if for one device."""

from __future__ import annotations

from collections.abc import Callable

from motley.errors import ModelError
from motley.gguf import ModelSpec
from motley.graph import Graph, Tensor
from motley.models import gemma3, llama, phi3, qwen2, qwen3
from motley.models.builder import (
    BatchShape,
    GraphOptions,
    ModelBuilder,
    cache_layer,
    cache_name,
    rotation_size,
)
from motley.models.params import DecoderParams

ARCHITECTURES: dict[str, Callable[[ModelBuilder], Tensor]] = {
    "gemma3": gemma3.build,
    "llama": llama.build,
    "phi3": phi3.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}


def read_params(spec: ModelSpec) -> DecoderParams:
    """The model's numbers; ModelError for an architecture that is not supported."""
    if spec.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{spec.path}: architecture {spec.architecture!r} is not supported",
            hint=f"supported: {', '.join(sorted(ARCHITECTURES))}",
        )
    return DecoderParams.from_spec(spec)


def build_graph(spec: ModelSpec, params: DecoderParams, batch: BatchShape, options: GraphOptions) -> Graph:
    """The model's graph for batches of one shape, as if for one device."""
    return Graph.of(ARCHITECTURES[spec.architecture](ModelBuilder(spec, params, batch, options)))


__all__ = [
    "ARCHITECTURES",
    "BatchShape",
    "DecoderParams",
    "GraphOptions",
    "build_graph",
    "cache_layer",
    "cache_name",
    "read_params",
    "rotation_size",
]
