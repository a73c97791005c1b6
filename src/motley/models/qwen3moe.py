"""Qwen 3 with an expert FFN; also the text model of Qwen 3 VL with experts."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import HALVES
from motley.models.blocks import decoder
from motley.models.builder import ModelBuilder
from motley.models.experts import expert_ffn


def build(builder: ModelBuilder) -> Tensor:
    return decoder(builder, rope=builder.params.rope(HALVES), has_qk_norm=True, feed_forward=expert_ffn)
