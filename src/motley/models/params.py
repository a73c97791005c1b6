"""The numbers of a decoder-only model, read once from a file's metadata and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from motley.errors import ModelError
from motley.gguf import ModelSpec, TensorInfo
from motley.graph.ops import Rope, Yarn


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched beyond the trained context."""

    kind: str = "none"  # none, linear, yarn, longrope
    factor: float = 1.0
    original_context: int = 0
    magnitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class DecoderParams:
    """Sizes and constants that a graph is built from."""

    architecture: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    rope_dims: int
    rope_base: float
    rope_scaling: RopeScaling
    attention_scale: float
    sliding_window: int | None

    @staticmethod
    def from_spec(spec: ModelSpec) -> DecoderParams:
        md, arch = spec.metadata, spec.architecture
        n_embd = md.int(f"{arch}.embedding_length")
        n_heads = _uniform(spec, f"{arch}.attention.head_count")
        n_kv_heads = _uniform(spec, f"{arch}.attention.head_count_kv", default=n_heads)
        if n_embd < 1 or n_heads < 1 or n_kv_heads < 1 or n_heads % n_kv_heads:
            raise ModelError(
                f"{spec.path}: {n_heads} attention heads, {n_kv_heads} KV heads, embedding of {n_embd}: "
                "heads must be positive and a multiple of KV heads"
            )
        head_dim = md.int(f"{arch}.attention.key_length", default=n_embd // n_heads)
        if md.int(f"{arch}.attention.value_length", default=head_dim) != head_dim:
            raise ModelError(f"{spec.path}: keys and values of different length are not supported")
        if md.int(f"{arch}.expert_count", default=0) > 0:
            raise ModelError(f"{spec.path}: {arch!r} with experts is not supported")
        return DecoderParams(
            architecture=arch,
            n_layers=md.int(f"{arch}.block_count"),
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            n_ff=_uniform(spec, f"{arch}.feed_forward_length"),
            n_vocab=tensor_info(spec, "token_embd.weight").shape[0],
            n_ctx_train=md.int(f"{arch}.context_length"),
            norm_eps=md.float(f"{arch}.attention.layer_norm_rms_epsilon"),
            rope_dims=md.int(f"{arch}.rope.dimension_count", default=head_dim),
            rope_base=md.float(f"{arch}.rope.freq_base", default=10000.0),
            rope_scaling=_rope_scaling(spec),
            attention_scale=md.float(f"{arch}.attention.scale", default=0.0) or head_dim**-0.5,
            sliding_window=md.int(f"{arch}.attention.sliding_window", default=0) or None,
        )

    def rope(self, style: str) -> Rope:
        """The rotary op with this model's base and scaling."""
        scaling = self.rope_scaling
        frequency_scale, magnitude, yarn = 1.0, scaling.magnitude, None
        if scaling.kind in ("linear", "yarn"):
            frequency_scale = 1.0 / scaling.factor
        if scaling.kind == "yarn":
            magnitude *= 1.0 + 0.1 * math.log(scaling.factor)
            yarn = Yarn(scaling.original_context, scaling.beta_fast, scaling.beta_slow)
        return Rope(self.rope_dims, self.rope_base, style, frequency_scale, magnitude, yarn)


def tensor_info(spec: ModelSpec, name: str) -> TensorInfo:
    info = spec.tensors.get(name)
    if info is None:
        raise ModelError(f"{spec.path}: the tensor {name!r}, which {spec.architecture!r} models have, is missing")
    return info


def _uniform(spec: ModelSpec, key: str, default: int | None = None) -> int:
    """An integer that some files give once per layer; layers that differ are not supported."""
    value = spec.metadata.get(key)
    if isinstance(value, int) or value is None:
        return spec.metadata.int(key) if default is None else spec.metadata.int(key, default=default)
    per_layer = set(spec.metadata.ints(key))
    if len(per_layer) != 1:
        raise ModelError(f"{spec.path}: {key} differs from layer to layer ({sorted(per_layer)}): not supported")
    return per_layer.pop()


def _rope_scaling(spec: ModelSpec) -> RopeScaling:
    md, prefix = spec.metadata, f"{spec.architecture}.rope.scaling"
    kind = md.str(f"{prefix}.type", default="none")
    if "rope_factors_long.weight" in spec.tensors:
        kind = "longrope"
    known = ("none", "linear", "yarn", "longrope")
    if kind not in known:
        raise ModelError(f"{spec.path}: rope scaling {kind!r} is not supported; there are {', '.join(known)}")
    factor = md.float(f"{prefix}.factor", default=1.0)
    original = md.int(f"{prefix}.original_context_length", default=0)
    if factor <= 0 or (kind == "yarn" and original <= 0):
        raise ModelError(f"{spec.path}: {prefix} has factor {factor} and original context {original}")
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=original or md.int(f"{spec.architecture}.context_length"),
        magnitude=md.float(f"{prefix}.attn_factor", default=1.0),
        beta_fast=md.float(f"{prefix}.yarn_beta_fast", default=32.0),
        beta_slow=md.float(f"{prefix}.yarn_beta_slow", default=1.0),
    )
