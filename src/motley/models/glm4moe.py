"""GLM 4.5: dense layers, then experts chosen by sigmoid scores plus a shared expert; RoPE rotates part of each head."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import HALVES
from motley.models.blocks import decoder, gated_ffn
from motley.models.builder import LayerBuilder, ModelBuilder
from motley.models.experts import expert_ffn


def build(builder: ModelBuilder) -> Tensor:
    return decoder(
        builder,
        rope=builder.params.rope(HALVES),
        has_qk_norm=builder.layer(0).has("attn_q_norm.weight"),  # only the largest model has it
        ffn_norm="post_attention_norm",
        feed_forward=_feed_forward,
    )


def _feed_forward(layer: LayerBuilder, x: Tensor) -> Tensor:
    experts = layer.params.experts
    is_dense = experts is None or layer.index < experts.n_dense_layers
    return gated_ffn(layer, x) if is_dense else expert_ffn(layer, x)
