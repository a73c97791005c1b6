"""Qwen 3: queries and keys are normed per head."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import HALVES
from motley.models.blocks import dense_decoder
from motley.models.builder import ModelBuilder


def build(builder: ModelBuilder) -> Tensor:
    return dense_decoder(builder, rope_style=HALVES, has_qk_norm=True)
