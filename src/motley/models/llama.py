"""Llama 1 to 3 and what shares its shape (Mistral, SmolLM, Yi, …)."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import INTERLEAVED
from motley.models.blocks import dense_decoder
from motley.models.builder import ModelBuilder


def build(builder: ModelBuilder) -> Tensor:
    return dense_decoder(builder, rope_style=INTERLEAVED)
