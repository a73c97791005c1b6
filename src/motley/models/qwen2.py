"""Qwen 2 and 2.5: biases on queries, keys and values."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import HALVES
from motley.models.blocks import decoder
from motley.models.builder import ModelBuilder


def build(builder: ModelBuilder) -> Tensor:
    builder.needs("attn_q.bias", "attn_k.bias", "attn_v.bias")
    return decoder(builder, rope=builder.params.rope(HALVES))
