"""The two halves of a decoder layer, in the variants that the architectures ask for by parameter."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import Activation, Add, Mul, Reshape, Rope, Slice
from motley.models.builder import LayerBuilder, ModelBuilder


def self_attention(
    layer: LayerBuilder, x: Tensor, *, rope: Rope, has_qk_norm: bool = False, window: int | None = None
) -> Tensor:
    """Grouped-query attention with rotary positions; x (tokens, embd) → (tokens, embd)."""
    p, n_tokens = layer.params, x.shape[0]
    q, k, v = _project(layer, x)
    if has_qk_norm:
        q, k = layer.norm(q, "attn_q_norm"), layer.norm(k, "attn_k_norm")
    divisors = _rope_divisors(layer)
    q = rope(q, layer.model.positions, *divisors, name=layer.label("q_rope"))
    k = rope(k, layer.model.positions, *divisors, name=layer.label("k_rope"))
    attended = layer.attend(q, k, v, window=window)
    flat = Reshape((n_tokens, p.n_heads * p.head_dim))(attended)
    return layer.linear(flat, "attn_output", p.n_embd)


def _project(layer: LayerBuilder, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as (tokens, heads, dim), from three matrices or one fused one."""
    p, n_tokens = layer.params, x.shape[0]
    n_q, n_kv = p.n_heads * p.head_dim, p.n_kv_heads * p.head_dim
    if layer.label("attn_qkv.weight") in layer.model.spec.tensors:
        qkv = layer.linear(x, "attn_qkv", n_q + 2 * n_kv, layer.kv_rows(n_q, 2 * p.n_kv_heads))
        n_stored = (qkv.shape[1] - n_q) // 2
        cuts = (0, n_q, n_q + n_stored, n_q + 2 * n_stored)
        parts = [
            Slice(1, start, stop)(qkv, name=layer.label(f"attn_{part}"))
            for part, start, stop in zip("qkv", cuts[:-1], cuts[1:], strict=True)
        ]
    else:
        rows = layer.kv_rows(0, p.n_kv_heads)
        k, v = layer.linear(x, "attn_k", n_kv, rows), layer.linear(x, "attn_v", n_kv, rows)
        parts = [layer.linear(x, "attn_q", n_q), k, v]
    q, k, v = (Reshape((n_tokens, part.shape[1] // p.head_dim, p.head_dim))(part) for part in parts)
    return q, k, v


def _rope_divisors(layer: LayerBuilder) -> list[Tensor]:
    """Frequency divisors that the file brings as a tensor: llama3's, or longrope's for short or long contexts."""
    p, model = layer.params, layer.model
    n_pairs = p.rope_dims // 2
    if p.rope_scaling.kind == "longrope":
        is_long = model.options.n_ctx > p.rope_scaling.original_context
        return [model.weight(f"rope_factors_{'long' if is_long else 'short'}.weight", n_pairs)]
    divisors = model.optional_weight("rope_freqs.weight", n_pairs)
    return [] if divisors is None else [divisors]


def gated_ffn(layer: LayerBuilder, x: Tensor, *, activation: str = "silu") -> Tensor:
    """down(activation(gate(x)) · up(x)), with gate and up as two matrices or one fused one."""
    n_ff = layer.params.n_ff
    if layer.label("ffn_gate.weight") in layer.model.spec.tensors:
        gate, up = layer.linear(x, "ffn_gate", n_ff), layer.linear(x, "ffn_up", n_ff)
    else:
        both = layer.linear(x, "ffn_up", 2 * n_ff)
        gate = Slice(1, 0, n_ff)(both, name=layer.label("ffn_gate"))
        up = Slice(1, n_ff, 2 * n_ff)(both, name=layer.label("ffn_up_half"))
    hidden = Mul()(Activation(activation)(gate), up, name=layer.label("ffn_hidden"))
    return layer.linear(hidden, "ffn_down", layer.params.n_embd)


def residual(layer: LayerBuilder, x: Tensor, change: Tensor, name: str) -> Tensor:
    return Add()(x, change, name=layer.label(name))


def dense_decoder(
    builder: ModelBuilder, *, rope_style: str, has_qk_norm: bool = False, window: int | None = None
) -> Tensor:
    """Norm → attention → add, norm → gated FFN → add, layer after layer: the common dense decoder. → logits"""
    x, rope = builder.embedding(), builder.params.rope(rope_style)
    for index in range(builder.params.n_layers):
        layer = builder.layer(index)
        normed = layer.norm(x, "attn_norm")
        attended = self_attention(layer, normed, rope=rope, has_qk_norm=has_qk_norm, window=window)
        x = residual(layer, x, attended, "after_attention")
        x = residual(layer, x, gated_ffn(layer, layer.norm(x, "ffn_norm")), "output")
    return builder.logits(x)
