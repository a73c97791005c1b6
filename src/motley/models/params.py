"""The parameters of a decoder-only model, read once from a file's metadata and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from motley.errors import ModelError
from motley.gguf import ModelSpec, TensorInfo
from motley.graph.ops import SIGMOID, SOFTMAX, Rope, Yarn

_MAX_COUNT = 2**31 - 1  # of layers, heads, dims or tokens: a larger number is a defect of the file

INCOMPLETE = "the file is damaged or incomplete: download or convert it again"


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE is scaled to contexts longer than the trained one."""

    kind: str = "none"  # none, linear, yarn, longrope
    factor: float = 1.0
    original_context: int = 0
    magnitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class ExpertParams:
    """Mixture of experts: each token uses `n_used` of `n_experts` FFNs, chosen by the layer's router."""

    n_experts: int
    n_used: int
    n_ff: int  # columns of one expert's hidden layer
    n_ff_shared: int  # the same for the shared expert, which every token uses; 0: no shared expert
    n_dense_layers: int  # layers before the first one that has experts
    score: str
    normalizes: bool
    scale: float
    n_groups: int
    n_groups_used: int

    @property
    def n_usable(self) -> int:
        """The most experts that one token can use: those of its groups."""
        return self.n_experts // self.n_groups * self.n_groups_used


GROUPED, CYCLIC = "grouped", "cyclic"


@dataclass(frozen=True)
class DeltaParams:
    """Gated delta nets: layers with a recurrent state instead of attention over a cache."""

    layers: tuple[int, ...]
    n_taps: int  # of the convolution
    n_key_heads: int
    n_value_heads: int
    head_dim: int  # of keys and of values
    is_cyclic: bool = False  # value head j uses key head j mod n_key_heads; otherwise neighbours share one

    @property
    def n_channels(self) -> int:
        """Columns of queries, keys and values together."""
        return (2 * self.n_key_heads + self.n_value_heads) * self.head_dim


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
    logit_softcap: float | None = None  # a tanh limits logits to ± this value
    experts: ExpertParams | None = None
    delta: DeltaParams | None = None
    n_nextn: int = 0  # multi-token prediction layers, which the file has after the others
    first_block: int = 0  # number of the first layer in the file
    is_nextn: bool = False  # the model is a multi-token prediction layer: see `nextn`

    @property
    def nextn(self) -> DecoderParams:
        """Those of the first multi-token prediction layer as a separate model. It is like the model's last layer."""
        assert self.n_nextn, "the file has none"
        experts = None if self.experts is None else replace(self.experts, n_dense_layers=0)
        return replace(
            self,
            n_layers=1,
            experts=experts,
            delta=None,
            n_nextn=0,
            first_block=self.n_layers,
            is_nextn=True,
        )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values in the cache."""
        states = self.delta.layers if self.delta is not None else ()
        return tuple(layer for layer in range(self.n_layers) if layer not in states)

    @staticmethod
    def from_spec(spec: ModelSpec, score: str = "", *, delta: str = "") -> DecoderParams:
        """The parameters in the file's metadata.

        `score`: the router's score function if the file does not give one; "": the architecture has no experts.
        `delta`: how value heads share key heads in the architecture's gated delta nets (GROUPED or CYCLIC); "": it has
        no such layers.
        """
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
        window_key = f"{arch}.attention.sliding_window"  # 0 also means none
        if not score and md.int(f"{arch}.expert_count", default=0) > 0:
            raise ModelError(f"{spec.path}: {arch!r} with experts is not supported")
        if md.float(f"{arch}.attn_logit_softcapping", default=0.0):
            raise ModelError(f"{spec.path}: {arch!r} with soft-capped attention scores is not supported")
        softcap_key = f"{arch}.final_logit_softcapping"  # 0 also means none
        scale_key = f"{arch}.attention.scale"  # 0 also means the usual one
        return DecoderParams(
            architecture=arch,
            n_layers=count_layers(spec),
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            n_ff=_n_ff(spec, has_experts=bool(score)),
            n_vocab=tensor_info(spec, "token_embd.weight").shape[0],
            n_ctx_train=read_count(spec, f"{arch}.context_length"),
            norm_eps=read_number(spec, f"{arch}.attention.layer_norm_rms_epsilon"),
            rope_dims=_rope_dims(spec, head_dim),
            rope_base=read_number(spec, f"{arch}.rope.freq_base", default=10000.0, above=1.0),
            rope_scaling=_rope_scaling(spec),
            attention_scale=read_number(spec, scale_key)
            if md.float(scale_key, default=0.0)
            else head_dim**-0.5,
            sliding_window=read_count(spec, window_key) if md.int(window_key, default=0) else None,
            logit_softcap=read_number(spec, softcap_key) if md.float(softcap_key, default=0.0) else None,
            experts=_experts(spec, score) if score else None,
            delta=_delta(spec, is_cyclic=delta == CYCLIC) if delta else None,
        )

    def rope(self, style: str, *, rounds: bool = True) -> Rope:
        """The rotary op with this model's base and scaling; `rounds`: see Yarn."""
        scaling = self.rope_scaling
        frequency_scale, magnitude, yarn = 1.0, scaling.magnitude, None
        if scaling.kind in ("linear", "yarn"):
            frequency_scale = 1.0 / scaling.factor
        if scaling.kind == "yarn":
            magnitude *= 1.0 + 0.1 * math.log(scaling.factor)
            yarn = Yarn(scaling.original_context, scaling.beta_fast, scaling.beta_slow, rounds)
        return Rope(self.rope_dims, self.rope_base, style, frequency_scale, magnitude, yarn)


def _n_ff(spec: ModelSpec, *, has_experts: bool) -> int:
    """Columns of a dense FFN's hidden layer. Files of models that only have experts may leave it out."""
    key, expert_key = (f"{spec.architecture}.{name}feed_forward_length" for name in ("", "expert_"))
    return read_count(spec, expert_key if has_experts and key not in spec.metadata else key)


def count_layers(spec: ModelSpec) -> int:
    """The number of decoder layers. Multi-token prediction layers (nextn) come after them and are not counted."""
    blocks_key, nextn_key = (f"{spec.architecture}.{key}" for key in ("block_count", "nextn_predict_layers"))
    n_blocks, n_nextn = read_count(spec, blocks_key), spec.metadata.int(nextn_key, default=0)
    if not 0 <= n_nextn < n_blocks:
        raise ModelError(f"{spec.path}: {nextn_key} is {n_nextn}, but {blocks_key} is {n_blocks}")
    return n_blocks - n_nextn


_SCORES = {1: SOFTMAX, 2: SIGMOID}  # by GGUF's number


def _experts(spec: ModelSpec, score: str) -> ExpertParams:
    md, prefix = spec.metadata, f"{spec.architecture}.expert"
    n_experts, n_used = read_count(spec, f"{prefix}_count"), read_count(spec, f"{prefix}_used_count")
    if n_used > n_experts:
        raise ModelError(f"{spec.path}: {prefix}_used_count is {n_used}, but {prefix}_count is {n_experts}")
    n_ff = read_count(
        spec,
        f"{prefix}_feed_forward_length",
        default=md.int(f"{spec.architecture}.feed_forward_length", default=0),
    )
    n_shared = _at_least_0(spec, f"{prefix}_shared_count")
    gating = md.int(f"{prefix}_gating_func", default=0)  # 0: the architecture's default
    if gating and gating not in _SCORES:
        known = ", ".join(f"{number} ({name})" for number, name in _SCORES.items())
        raise ModelError(f"{spec.path}: {prefix}_gating_func {gating} is not supported; there are {known}")
    scale_key = f"{prefix}_weights_scale"
    n_groups = _at_least_0(spec, f"{prefix}_group_count") or 1
    n_groups_used = _at_least_0(spec, f"{prefix}_group_used_count") or n_groups
    if n_experts % n_groups or n_groups_used > n_groups:
        raise ModelError(
            f"{spec.path}: {n_groups_used} of {n_groups} groups of {n_experts} experts cannot be chosen"
        )
    experts = ExpertParams(
        n_experts=n_experts,
        n_used=n_used,
        n_ff=n_ff,
        n_ff_shared=_at_least_0(spec, f"{prefix}_shared_feed_forward_length") or n_shared * n_ff,
        n_dense_layers=_at_least_0(spec, f"{spec.architecture}.leading_dense_block_count"),
        score=_SCORES.get(gating, score),
        normalizes=md.bool(f"{prefix}_weights_norm", default=True),
        scale=read_number(spec, scale_key) if md.float(scale_key, default=0.0) else 1.0,  # 0 also means none
        n_groups=n_groups,
        n_groups_used=n_groups_used,
    )
    if n_used > experts.n_usable:
        raise ModelError(
            f"{spec.path}: {prefix}_used_count is {n_used}, but a token can use {experts.n_usable} at most: the "
            f"experts of {n_groups_used} of {n_groups} groups"
        )
    return experts


def _delta(spec: ModelSpec, *, is_cyclic: bool) -> DeltaParams:
    arch, n_layers = spec.architecture, count_layers(spec)
    interval = read_count(spec, f"{arch}.full_attention_interval", default=4)
    n_keys, n_values = (read_count(spec, f"{arch}.ssm.{key}") for key in ("group_count", "time_step_rank"))
    head_dim, inner = (read_count(spec, f"{arch}.ssm.{key}") for key in ("state_size", "inner_size"))
    if n_values % n_keys or inner != n_values * head_dim:
        raise ModelError(
            f"{spec.path}: {arch}.ssm has {n_keys} key heads (group_count), {n_values} value heads "
            f"(time_step_rank) of {head_dim} dims (state_size) and an inner_size of {inner}: value heads must be a "
            "multiple of key heads, and inner_size their dims"
        )
    n_taps = read_count(spec, f"{arch}.ssm.conv_kernel")
    if not 2 <= n_taps <= _MAX_TAPS:
        raise ModelError(f"{spec.path}: {arch}.ssm.conv_kernel is {n_taps}, not 2 to {_MAX_TAPS}")
    layers = tuple(layer for layer in range(n_layers) if (layer + 1) % interval)
    if len(layers) == n_layers:
        raise ModelError(
            f"{spec.path}: no layer has attention ({n_layers} layers, full_attention_interval {interval})"
        )
    return DeltaParams(layers, n_taps, n_keys, n_values, head_dim, is_cyclic)


_MAX_TAPS = 64


def _at_least_0(spec: ModelSpec, key: str) -> int:
    number = spec.metadata.int(key, default=0)
    if number < 0:
        raise ModelError(f"{spec.path}: {key} is {number}, but must be at least 0")
    return number


def tensor_info(spec: ModelSpec, name: str) -> TensorInfo:
    info = spec.tensors.get(name)
    if info is None:
        raise ModelError(
            f"{spec.path}: the tensor {name!r}, which {spec.architecture!r} models have, is missing",
            hint=INCOMPLETE,
        )
    return info


def format_name(spec: ModelSpec, info: TensorInfo) -> str:
    """The name of the tensor's format; ModelError for one that is not supported."""
    try:
        return info.format.name
    except ModelError as error:
        raise ModelError(f"{spec.path}: {error.message}", hint=error.hint) from None


def read_count(spec: ModelSpec, key: str, default: int | None = None) -> int:
    """A whole number of at least 1. Some files give one number per layer; all of them must be equal."""
    md, value = spec.metadata, spec.metadata.get(key)
    if value is None or isinstance(value, int):
        values = {md.int(key) if default is None else md.int(key, default=default)}
    else:
        values = set(md.ints(key))
    if len(values) != 1:
        raise ModelError(f"{spec.path}: {key} differs from layer to layer ({sorted(values)}): not supported")
    (count,) = values
    if not 1 <= count <= _MAX_COUNT:
        limit = "at least 1" if count < 1 else f"at most {_MAX_COUNT}"
        raise ModelError(f"{spec.path}: {key} is {count}, but must be {limit}")
    return count


def read_number(spec: ModelSpec, key: str, default: float | None = None, *, above: float = 0.0) -> float:
    """A finite number greater than `above`. Any other number would lead to NaN or a division by zero."""
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
    # A factor without a type means linear scaling: older files have no type.
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
