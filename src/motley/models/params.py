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
        n_embd = read_count(spec, f"{arch}.embedding_length")
        n_heads = read_count(spec, f"{arch}.attention.head_count")
        n_kv_heads = read_count(spec, f"{arch}.attention.head_count_kv", default=n_heads)
        if n_heads % n_kv_heads or n_heads > n_embd:
            raise ModelError(
                f"{spec.path}: {n_heads} attention heads, {n_kv_heads} KV heads, embedding of {n_embd}: "
                "heads must be a multiple of KV heads and no more than the embedding's values"
            )
        head_dim = read_count(spec, f"{arch}.attention.key_length", default=n_embd // n_heads)
        if md.int(f"{arch}.attention.value_length", default=head_dim) != head_dim:
            raise ModelError(f"{spec.path}: keys and values of different length are not supported")
        window_key = f"{arch}.attention.sliding_window"  # 0, too, means that there is none
        if md.int(f"{arch}.expert_count", default=0) > 0:
            raise ModelError(f"{spec.path}: {arch!r} with experts is not supported")
        return DecoderParams(
            architecture=arch,
            n_layers=read_count(spec, f"{arch}.block_count"),
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            n_ff=read_count(spec, f"{arch}.feed_forward_length"),
            n_vocab=tensor_info(spec, "token_embd.weight").shape[0],
            n_ctx_train=read_count(spec, f"{arch}.context_length"),
            norm_eps=read_number(spec, f"{arch}.attention.layer_norm_rms_epsilon"),
            rope_dims=_rope_dims(spec, head_dim),
            rope_base=read_number(spec, f"{arch}.rope.freq_base", default=10000.0, above=1.0),
            rope_scaling=_rope_scaling(spec),
            attention_scale=md.float(f"{arch}.attention.scale", default=0.0) or head_dim**-0.5,
            sliding_window=read_count(spec, window_key) if md.int(window_key, default=0) else None,
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
        raise ModelError(
            f"{spec.path}: the tensor {name!r}, which {spec.architecture!r} models have, is missing"
        )
    return info


def read_count(spec: ModelSpec, key: str, default: int | None = None) -> int:
    """A whole number of at least 1. Some files give it once per layer, which must not differ then."""
    md, value = spec.metadata, spec.metadata.get(key)
    if value is None or isinstance(value, int):
        values = {md.int(key) if default is None else md.int(key, default=default)}
    else:
        values = set(md.ints(key))
    if len(values) != 1:
        raise ModelError(f"{spec.path}: {key} differs from layer to layer ({sorted(values)}): not supported")
    (count,) = values
    if count < 1:
        raise ModelError(f"{spec.path}: {key} is {count}, but must be at least 1")
    return count


def read_number(spec: ModelSpec, key: str, default: float | None = None, *, above: float = 0.0) -> float:
    """A finite number above a bound: others would end in NaN or a division by zero."""
    number = spec.metadata.float(key) if default is None else spec.metadata.float(key, default=default)
    if not above < number < math.inf:
        raise ModelError(f"{spec.path}: {key} is {number}, but must be a finite number above {above:g}")
    return number


def _rope_dims(spec: ModelSpec, head_dim: int) -> int:
    key = f"{spec.architecture}.rope.dimension_count"
    n_dims = spec.metadata.int(key, default=head_dim)
    if n_dims % 2 or not 0 <= n_dims <= head_dim:
        raise ModelError(f"{spec.path}: {key} is {n_dims}, but must be even and at most a head's {head_dim}")
    return n_dims


def _rope_scaling(spec: ModelSpec) -> RopeScaling:
    md, prefix = spec.metadata, f"{spec.architecture}.rope.scaling"
    # A factor without a type is linear: files were written so before there were other types.
    kind = md.str(f"{prefix}.type", default="linear" if f"{prefix}.factor" in md else "none")
    if any(name.startswith("rope_factors_") for name in spec.tensors):
        kind = "longrope"
    known = ("none", "linear", "yarn", "longrope")
    if kind not in known:
        raise ModelError(f"{spec.path}: rope scaling {kind!r} is not supported; there are {', '.join(known)}")
    original = md.int(f"{prefix}.original_context_length", default=0)
    if original < 0 or (kind == "yarn" and original == 0):
        raise ModelError(f"{spec.path}: {prefix} is {kind!r} with an original context of {original} tokens")
    return RopeScaling(
        kind=kind,
        factor=read_number(spec, f"{prefix}.factor", default=1.0),
        original_context=original or read_count(spec, f"{spec.architecture}.context_length"),
        magnitude=read_number(spec, f"{prefix}.attn_factor", default=1.0),
        beta_fast=read_number(spec, f"{prefix}.yarn_beta_fast", default=32.0),
        beta_slow=read_number(spec, f"{prefix}.yarn_beta_slow", default=1.0),
    )
