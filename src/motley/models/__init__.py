"""One file per architecture, named as `general.architecture`; each builds a graph as if for one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from motley.errors import ModelError
from motley.gguf import ModelSpec
from motley.graph import Graph, Tensor
from motley.graph.ops import SIGMOID, SOFTMAX
from motley.models import gemma3, glm4moe, gpt_oss, llama, phi3, qwen2, qwen3, qwen3moe, qwen3next
from motley.models.builder import (
    HIDDEN,
    N_EXPERT_USED,
    BatchShape,
    GraphOptions,
    ModelBuilder,
    rotation_size,
)
from motley.models.checking import check_values, count_nextn, unused_notice, unused_tensors
from motley.models.params import (
    CYCLIC,
    GROUPED,
    DecoderParams,
    DeltaParams,
    ExpertParams,
    count_layers,
)

ARCHITECTURES: dict[str, Callable[[ModelBuilder], Tensor]] = {
    "gemma3": gemma3.build,
    "glm4moe": glm4moe.build,
    "gpt-oss": gpt_oss.build,
    "llama": llama.build,
    "phi3": phi3.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "qwen3moe": qwen3moe.build,
    "qwen35": qwen3next.build,  # Qwen 3.5: the same layers, with another order of value heads; M-RoPE is RoPE for text
    "qwen35moe": qwen3next.build,
    "qwen3next": qwen3next.build,
    "qwen3vlmoe": qwen3moe.build,  # the text model is qwen3moe's: with equal positions M-RoPE is plain RoPE
}

# Architectures with experts: the router's score function. Used if the file does not give one.
_SCORES = {
    "glm4moe": SIGMOID,
    "gpt-oss": SOFTMAX,
    "qwen3moe": SOFTMAX,
    "qwen35moe": SOFTMAX,
    "qwen3next": SOFTMAX,
    "qwen3vlmoe": SOFTMAX,
}
# Architectures with gated delta nets: how value heads share key heads.
_DELTA = {"qwen35": CYCLIC, "qwen35moe": CYCLIC, "qwen3next": GROUPED}

# Architectures whose multi-token prediction layers are used.
_NEXTN = ("glm4moe", "qwen35", "qwen35moe", "qwen3next")


def read_params(spec: ModelSpec) -> DecoderParams:
    """The model's parameters. Raises ModelError for an architecture that is not supported."""
    if spec.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{spec.path}: architecture {spec.architecture!r} is not supported",
            hint=f"supported: {', '.join(sorted(ARCHITECTURES))}",
        )
    score, delta = (table.get(spec.architecture, "") for table in (_SCORES, _DELTA))
    n_nextn = count_nextn(spec, count_layers(spec))  # first: an absurd number of layers fails here
    params = DecoderParams.from_spec(spec, score, delta=delta)
    return replace(params, n_nextn=n_nextn if spec.architecture in _NEXTN else 0)


def build_graph(spec: ModelSpec, params: DecoderParams, batch: BatchShape, options: GraphOptions) -> Graph:
    """The model's graph for batches of one shape, as if for one device. Outputs: logits, and hidden states if kept."""
    builder = ModelBuilder(spec, params, batch, options)
    logits = ARCHITECTURES[spec.architecture](builder)
    return Graph.of(logits) if builder.hidden is None else Graph.of(logits, builder.hidden)


def check_tensors(spec: ModelSpec, params: DecoderParams) -> str | None:
    """The sentence about tensors that the model does not read; None if it reads all.

    Raises ModelError if a tensor is missing, has another shape, has values that are no numbers (of small tensors), or
    would be needed for right answers and is not read.
    """
    smallest, options = BatchShape(1, 1), GraphOptions(params.n_ctx_train)
    graph = build_graph(spec, params, smallest, options)
    names = unused_tensors(spec, graph, params.n_layers)
    graphs = [graph, build_graph(spec, params.nextn, smallest, options)] if params.n_nextn else [graph]
    for each in graphs:
        check_values(spec, each)
    return unused_notice(names)


__all__ = [
    "ARCHITECTURES",
    "HIDDEN",
    "N_EXPERT_USED",
    "BatchShape",
    "DecoderParams",
    "DeltaParams",
    "ExpertParams",
    "GraphOptions",
    "build_graph",
    "check_tensors",
    "read_params",
    "rotation_size",
]
