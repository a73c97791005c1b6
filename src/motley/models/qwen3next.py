"""Qwen 3 Next: three gated delta nets, then one attention layer with gated output; experts in every layer.

Qwen 3.5 has the same layers, with experts (qwen35moe) or a dense FFN (qwen35).
"""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import HALVES, Activation, Mul, Reshape, Slice
from motley.graph.roles import GATED_QUERIES, HEADS, KEYS, QUERIES
from motley.models.blocks import all_layers, gated_ffn, residual
from motley.models.builder import LayerBuilder, ModelBuilder
from motley.models.delta import delta_net
from motley.models.experts import expert_ffn
from motley.models.nextn import build_nextn


def build(builder: ModelBuilder) -> Tensor:
    builder.needs("ffn_gate_inp_shexp.weight")
    return build_nextn(builder, _layer) if builder.params.is_nextn else all_layers(builder, _layer)


def _layer(layer: LayerBuilder, x: Tensor) -> Tensor:
    p = layer.params
    feed_forward = expert_ffn if p.experts is not None else gated_ffn
    is_delta = (
        p.delta is not None and layer.index in p.delta.layers
    )  # a multi-token prediction layer has attention
    mix = delta_net if is_delta else _gated_attention
    x = residual(layer, x, mix(layer, layer.norm(x, "attn_norm")), "after_attention")
    return residual(layer, x, feed_forward(layer, layer.norm(x, "post_attention_norm")), "output")


def _gated_attention(layer: LayerBuilder, x: Tensor) -> Tensor:
    """Attention with normed queries and keys; its output is multiplied by σ(gate), one gate for each query dim."""
    p, n_tokens = layer.params, x.shape[0]
    n_heads, dim = p.n_heads, p.head_dim
    both = layer.linear(x, "attn_q", 2 * n_heads * dim, layer.role(HEADS, 0, GATED_QUERIES))
    both = Reshape((n_tokens, n_heads, 2 * dim))(both)
    q = Slice(2, 0, dim)(both, name=layer.label("attn_queries"))
    gate = Slice(2, dim, 2 * dim)(both, name=layer.label("attn_gates"))
    rows, role = layer.kv_rows(0, p.n_kv_heads), layer.role(HEADS, 0, KEYS)
    k, v = (layer.linear(x, name, p.n_kv_heads * dim, role, rows) for name in ("attn_k", "attn_v"))
    k, v = (Reshape((n_tokens, t.shape[1] // dim, dim))(t) for t in (k, v))
    q, k = layer.norm(q, "attn_q_norm"), layer.norm(k, "attn_k_norm")
    rope = p.rope(HALVES)
    q = rope(q, layer.model.positions, name=layer.label("q_rope"))
    k = rope(k, layer.model.positions, name=layer.label("k_rope"))
    gated = Mul()(layer.attend(q, k, v), Activation("sigmoid")(gate), name=layer.label("attn_gated"))
    flat = Reshape((n_tokens, n_heads * dim))(gated)
    return layer.linear(flat, "attn_output", p.n_embd, layer.role(HEADS, 1, QUERIES))
