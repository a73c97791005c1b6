"""The two halves of a decoder layer, with the architectures' variants as parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from motley.graph import Tensor
from motley.graph.ops import Activation, Add, Mul, Reshape, Rope, Slice
from motley.graph.roles import COLUMNS, FFN, HEADS, KEYS, QUERIES, Role
from motley.models.builder import LayerBuilder, ModelBuilder
from motley.models.params import tensor_info


def self_attention(
    layer: LayerBuilder,
    x: Tensor,
    *,
    rope: Rope,
    has_qk_norm: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Grouped-query attention with rotary positions; x (tokens, embd) → (tokens, embd)."""
    p, n_tokens = layer.params, x.shape[0]
    q, k, v = _project(layer, x)
    if has_qk_norm:
        q, k = layer.norm(q, "attn_q_norm"), layer.norm(k, "attn_k_norm")
    divisors = _rope_divisors(layer)
    q = rope(q, layer.model.positions, *divisors, name=layer.label("q_rope"))
    k = rope(k, layer.model.positions, *divisors, name=layer.label("k_rope"))
    attended = layer.attend(q, k, v, window=window, scale=scale)
    flat = Reshape((n_tokens, p.n_heads * p.head_dim))(attended)
    return layer.linear(flat, "attn_output", p.n_embd, layer.role(HEADS, 1, QUERIES))


def _project(layer: LayerBuilder, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as (tokens, heads, dim), from three matrices or one fused one."""
    p, n_tokens = layer.params, x.shape[0]
    n_q, n_kv = p.n_heads * p.head_dim, p.n_kv_heads * p.head_dim
    if layer.is_fused("attn_qkv.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight"):
        role = layer.role(HEADS, 0, QUERIES, KEYS, KEYS)
        qkv = layer.linear(x, "attn_qkv", n_q + 2 * n_kv, role, layer.kv_rows(n_q, 2 * p.n_kv_heads))
        n_stored = (qkv.shape[1] - n_q) // 2
        cuts = (0, n_q, n_q + n_stored, n_q + 2 * n_stored)
        parts = [
            Slice(1, start, stop)(qkv, name=layer.label(f"attn_{part}"))
            for part, start, stop in zip("qkv", cuts[:-1], cuts[1:], strict=True)
        ]
    else:
        layer.all_or_none("attn_q.bias", "attn_k.bias", "attn_v.bias")
        rows, role = layer.kv_rows(0, p.n_kv_heads), layer.role(HEADS, 0, KEYS)
        k, v = layer.linear(x, "attn_k", n_kv, role, rows), layer.linear(x, "attn_v", n_kv, role, rows)
        parts = [layer.linear(x, "attn_q", n_q, layer.role(HEADS, 0, QUERIES)), k, v]
    q, k, v = (Reshape((n_tokens, part.shape[1] // p.head_dim, p.head_dim))(part) for part in parts)
    return q, k, v


def _rope_divisors(layer: LayerBuilder) -> list[Tensor]:
    """Frequency divisors that the file stores as a tensor: llama3's, or longrope's for short or long contexts."""
    p, model = layer.params, layer.model
    n_pairs = p.rope_dims // 2
    if p.rope_scaling.kind == "longrope":
        is_long = model.options.n_ctx > p.rope_scaling.original_context
        name = f"rope_factors_{'long' if is_long else 'short'}.weight"
        return [model.weight(name, n_pairs, role=Role())]
    divisors = model.optional_weight("rope_freqs.weight", n_pairs, role=Role())
    return [] if divisors is None else [divisors]


def gated_ffn(layer: LayerBuilder, x: Tensor, *, activation: str = "silu") -> Tensor:
    """down(activation(gate(x)) · up(x)), with gate and up as two matrices or one fused one."""
    n_ff = layer.params.n_ff
    if not _has_fused_ffn(layer):
        return separate_ffn(layer, x, n_ff, activation=activation)
    both = layer.linear(x, "ffn_up", 2 * n_ff, layer.role(FFN, 0, COLUMNS, COLUMNS))
    gate = Slice(1, 0, n_ff)(both, name=layer.label("ffn_gate"))
    up = Slice(1, n_ff, 2 * n_ff)(both, name=layer.label("ffn_up_half"))
    hidden = Mul()(Activation(activation)(gate), up, name=layer.label("ffn_hidden"))
    return layer.linear(hidden, "ffn_down", layer.params.n_embd, layer.role(FFN, 1, COLUMNS))


def _has_fused_ffn(layer: LayerBuilder) -> bool:
    """Whether ffn_up holds the gates, too. Where it has the rows of ups alone, the gates are missing."""
    spec = layer.model.spec
    if layer.label("ffn_gate.weight") in spec.tensors:
        return False
    return tensor_info(spec, layer.label("ffn_up.weight")).shape[0] != layer.params.n_ff


def separate_ffn(
    layer: LayerBuilder, x: Tensor, n_ff: int, *, suffix: str = "", group: str = FFN, activation: str = "silu"
) -> Tensor:
    """The gated FFN of the matrices ffn_gate, ffn_up and ffn_down, whose names end in `suffix`."""
    rows = layer.role(group, 0, COLUMNS)
    gate, up = (layer.linear(x, f"ffn_{part}{suffix}", n_ff, rows) for part in ("gate", "up"))
    hidden = Mul()(Activation(activation)(gate), up, name=layer.label(f"ffn_hidden{suffix}"))
    return layer.linear(hidden, f"ffn_down{suffix}", layer.params.n_embd, layer.role(group, 1, COLUMNS))


def residual(layer: LayerBuilder, x: Tensor, change: Tensor, name: str) -> Tensor:
    return Add()(x, change, name=layer.label(name))


def no_window(layer: LayerBuilder) -> int | None:
    return None


def decoder_layer(
    layer: LayerBuilder,
    x: Tensor,
    *,
    rope: Rope,
    has_qk_norm: bool = False,
    window: Callable[[LayerBuilder], int | None] = no_window,
    ffn_norm: str = "ffn_norm",
    feed_forward: Callable[[LayerBuilder, Tensor], Tensor] = gated_ffn,
) -> Tensor:
    """Norm → attention → add, norm → FFN → add: the common layer; x (tokens, embd) → (tokens, embd)."""
    normed = layer.norm(x, "attn_norm")
    attended = self_attention(layer, normed, rope=rope, has_qk_norm=has_qk_norm, window=window(layer))
    x = residual(layer, x, attended, "after_attention")
    return residual(layer, x, feed_forward(layer, layer.norm(x, ffn_norm)), "output")


def all_layers(builder: ModelBuilder, run_layer: Callable[[LayerBuilder, Tensor], Tensor]) -> Tensor:
    """Embedding, layer after layer, output. → logits"""
    x = builder.embedding()
    for index in range(builder.n_layers):
        x = run_layer(builder.layer(index), x)
    return builder.logits(x)


def decoder(
    builder: ModelBuilder,
    *,
    rope: Rope,
    has_qk_norm: bool = False,
    window: Callable[[LayerBuilder], int | None] = no_window,
    ffn_norm: str = "ffn_norm",
    feed_forward: Callable[[LayerBuilder, Tensor], Tensor] = gated_ffn,
) -> Tensor:
    """The common decoder: all layers are `decoder_layer`. → logits"""
    return all_layers(
        builder,
        partial(
            decoder_layer,
            rope=rope,
            has_qk_norm=has_qk_norm,
            window=window,
            ffn_norm=ffn_norm,
            feed_forward=feed_forward,
        ),
    )
