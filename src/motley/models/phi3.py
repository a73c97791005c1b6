"""Phi 3 and 4: fused QKV and gate-up matrices, longrope, on some sizes a sliding window."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import HALVES
from motley.models.blocks import dense_decoder
from motley.models.builder import ModelBuilder


def build(builder: ModelBuilder) -> Tensor:
    return dense_decoder(builder, rope_style=HALVES, window=builder.params.sliding_window)
