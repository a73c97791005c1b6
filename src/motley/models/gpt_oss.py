"""gpt-oss: attention sinks, biases, a sliding window in every other layer, experts with a clamped SwiGLU."""

from __future__ import annotations

from functools import partial

from motley.graph import Tensor
from motley.graph.ops import HALVES
from motley.models.blocks import decoder
from motley.models.builder import LayerBuilder, ModelBuilder
from motley.models.experts import expert_ffn


def build(builder: ModelBuilder) -> Tensor:
    return decoder(
        builder,
        rope=builder.params.rope(HALVES, rounds=False),  # `truncate: false`, for which GGUF has no key
        window=_window,
        ffn_norm="post_attention_norm",
        feed_forward=partial(expert_ffn, function="clamped_swiglu"),
    )


def _window(layer: LayerBuilder) -> int | None:
    return layer.params.sliding_window if layer.index % 2 == 0 else None
