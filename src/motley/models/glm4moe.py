"""GLM 4.5: dense layers, then experts chosen by sigmoid scores plus a shared expert; RoPE rotates part of each head."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import HALVES
from motley.models.blocks import all_layers, decoder_layer, gated_ffn
from motley.models.builder import LayerBuilder, ModelBuilder
from motley.models.experts import expert_ffn
from motley.models.nextn import build_nextn


def build(builder: ModelBuilder) -> Tensor:
    builder.needs("exp_probs_b.bias")
    return build_nextn(builder, _layer) if builder.params.is_nextn else all_layers(builder, _layer)


def _layer(layer: LayerBuilder, x: Tensor) -> Tensor:
    return decoder_layer(
        layer,
        x,
        rope=layer.params.rope(HALVES),
        has_qk_norm=layer.has("attn_q_norm.weight")
        or layer.has("attn_k_norm.weight"),  # only in the largest model
        ffn_norm="post_attention_norm",
        feed_forward=_feed_forward,
    )


def _feed_forward(layer: LayerBuilder, x: Tensor) -> Tensor:
    experts = layer.params.experts
    is_dense = experts is None or layer.index < experts.n_dense_layers
    return gated_ffn(layer, x) if is_dense else expert_ffn(layer, x)
