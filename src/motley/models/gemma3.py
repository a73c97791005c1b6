"""Gemma 3: sliding-window layers (with their own unscaled RoPE) and global ones; norms before and after each block."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import HALVES, Rope, Scale
from motley.models.blocks import gated_ffn, residual, self_attention
from motley.models.builder import ModelBuilder
from motley.models.params import read_count, read_number

_N_LAYERS_27B = 62
_PERIOD = 6  # every sixth layer is global if the file does not say otherwise


def build(builder: ModelBuilder) -> Tensor:
    p, spec = builder.params, builder.spec
    period = read_count(spec, "gemma3.attention.sliding_window_pattern", default=_PERIOD)
    local_base = read_number(spec, "gemma3.rope.freq_base_swa", default=10000.0, above=1.0)
    global_rope, local_rope = p.rope(HALVES), Rope(p.rope_dims, local_base, HALVES)
    scale = _attention_scale(builder)
    x = Scale(p.n_embd**0.5)(builder.embedding(), name="scaled_embedding")
    for index in range(builder.n_layers):
        layer = builder.layer(index)
        is_global = p.sliding_window is None or index % period == period - 1
        attended = self_attention(
            layer,
            layer.norm(x, "attn_norm"),
            rope=global_rope if is_global else local_rope,
            has_qk_norm=True,
            window=None if is_global else p.sliding_window,
            scale=scale,
        )
        x = residual(layer, x, layer.norm(attended, "post_attention_norm"), "after_attention")
        changed = gated_ffn(layer, layer.norm(x, "ffn_norm"), activation="gelu_tanh")
        x = residual(layer, x, layer.norm(changed, "post_ffw_norm"), "output")
    return builder.logits(x)


def _attention_scale(builder: ModelBuilder) -> float:
    """The factor of attention scores. The 27B model has a different one, and its files have no key for it.

    So the model is recognised by its number of layers, as in llama.cpp.
    """
    p = builder.params
    is_given = builder.spec.metadata.float("gemma3.attention.scale", default=0.0) != 0
    if p.n_layers == _N_LAYERS_27B and not is_given:
        return float((p.n_embd // p.n_heads) ** -0.5)
    return p.attention_scale
