"""Phi 3 and 4: fused QKV and gate-up matrices, longrope; some sizes have a sliding window."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import HALVES
from motley.models.blocks import decoder
from motley.models.builder import ModelBuilder


def build(builder: ModelBuilder) -> Tensor:
    return decoder(
        builder, rope=builder.params.rope(HALVES), window=lambda layer: layer.params.sliding_window
    )
