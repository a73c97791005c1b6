"""Llama 1 to 3 and models with the same structure (Mistral, SmolLM, Yi, …)."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import INTERLEAVED
from motley.models.blocks import decoder
from motley.models.builder import ModelBuilder


def build(builder: ModelBuilder) -> Tensor:
    return decoder(builder, rope=builder.params.rope(INTERLEAVED))
