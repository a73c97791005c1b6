"""gpt-oss: attention sinks, biases, a sliding window in every other layer, experts with a clamped SwiGLU."""

from __future__ import annotations

from functools import partial

from motley.errors import ModelError
from motley.graph import Tensor
from motley.graph.ops import HALVES
from motley.models.blocks import decoder
from motley.models.builder import LayerBuilder, ModelBuilder
from motley.models.experts import expert_ffn
from motley.models.params import INCOMPLETE

_BIASED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps")


def build(builder: ModelBuilder) -> Tensor:
    if builder.params.sliding_window is None:
        raise ModelError(
            f"{builder.spec.path}: gpt-oss.attention.sliding_window is missing or 0: every other layer has one",
            hint=INCOMPLETE,
        )
    builder.needs("output.weight", "attn_sinks.weight", *(f"{name}.bias" for name in _BIASED))
    return decoder(
        builder,
        rope=builder.params.rope(HALVES, rounds=False),  # `truncate: false`, for which GGUF has no key
        window=_window,
        ffn_norm="post_attention_norm",
        feed_forward=partial(expert_ffn, function="clamped_swiglu"),
    )


def _window(layer: LayerBuilder) -> int | None:
    return layer.params.sliding_window if layer.index % 2 == 0 else None
