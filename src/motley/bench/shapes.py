"""Sizes of known models, and the tensors that a model of such sizes has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from motley.formats import Format, get_format

_FALLBACK = "Q8_0"  # for matrices whose rows are not a multiple of the requested format's block


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of layers with experts."""

    n_experts: int
    n_used: int
    n_ff: int
    n_ff_shared: int = 0
    n_dense_layers: int = 0  # number of layers before the first one with experts
    weights: str = ""  # the experts' format, independent of the other matrices


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of layers with a gated delta net: all but each `interval`-th layer."""

    n_keys: int
    n_values: int
    head_dim: int
    n_taps: int = 4
    interval: int = 4


@dataclass(frozen=True)
class RandomTensor:
    """A tensor to write. A vector is filled with ones (a norm) or zeros."""

    name: str
    shape: tuple[int, ...]
    format: Format
    fill: float | None = None  # None: random


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int
    n_ctx: int = 131072
    architecture: str = "llama"
    experts: ExpertShape | None = None
    delta: DeltaShape | None = None
    n_rope: int | None = None  # rotated dims of a head; None: all
    finer: str = (
        ""  # the format of the output and of every fourth layer's ffn_down and attn_v; "": as the others
    )

    def tensors(self, form: Format) -> Iterator[RandomTensor]:
        """All tensors of the model, with matrices in `form` where their rows are whole blocks."""

        def matrix(name: str, *shape: int, wanted: Format = form) -> RandomTensor:
            fits = shape[-1] % wanted.block_size == 0
            return RandomTensor(f"{name}.weight", shape, wanted if fits else get_format(_FALLBACK))

        yield matrix("token_embd", self.n_vocab, self.n_embd)
        finer = get_format(self.finer) if self.finer else form
        yield matrix("output", self.n_vocab, self.n_embd, wanted=finer)
        yield _vector("output_norm.weight", 1.0, self.n_embd)
        n_q, n_kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        for i in range(self.n_layers):
            block, best = f"blk.{i}", form if i % 4 else finer
            if self.delta is not None and (i + 1) % self.delta.interval:
                yield from self._delta_tensors(block, self.delta, form)
            else:
                n_out = n_q if self.delta is None else 2 * n_q  # queries and gates
                yield matrix(f"{block}.attn_q", n_out, self.n_embd)
                yield matrix(f"{block}.attn_k", n_kv, self.n_embd)
                yield matrix(f"{block}.attn_v", n_kv, self.n_embd, wanted=best)
                yield matrix(f"{block}.attn_output", self.n_embd, n_q)
                yield from self._vectors(block, n_q, n_kv)
            experts = self.experts
            if experts is None or i < experts.n_dense_layers:
                yield from (matrix(f"{block}.ffn_{part}", self.n_ff, self.n_embd) for part in ("gate", "up"))
                yield matrix(f"{block}.ffn_down", self.n_embd, self.n_ff, wanted=best)
                continue
            wanted = get_format(experts.weights) if experts.weights else form
            rows = (experts.n_experts, experts.n_ff, self.n_embd)
            yield from (matrix(f"{block}.ffn_{part}_exps", *rows, wanted=wanted) for part in ("gate", "up"))
            columns = (experts.n_experts, self.n_embd, experts.n_ff)
            yield matrix(f"{block}.ffn_down_exps", *columns, wanted=wanted)
            yield matrix(f"{block}.ffn_gate_inp", experts.n_experts, self.n_embd, wanted=get_format("F32"))
            if experts.n_ff_shared:
                rows_shared = (experts.n_ff_shared, self.n_embd)
                yield from (matrix(f"{block}.ffn_{part}_shexp", *rows_shared) for part in ("gate", "up"))
                yield matrix(f"{block}.ffn_down_shexp", self.n_embd, experts.n_ff_shared)
            yield from self._expert_vectors(block, experts)

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """The name without ".weight", the rows and the columns of each matrix; experts are none."""
        for tensor in self.tensors(get_format("F32")):
            if len(tensor.shape) == 2:
                yield tensor.name.removesuffix(".weight"), *tensor.shape

    def _vectors(self, block: str, n_q: int, n_kv: int) -> Iterator[RandomTensor]:
        yield from self._norms(block)
        if self.architecture in ("qwen3moe", "qwen3next"):
            for norm in ("attn_q_norm", "attn_k_norm"):
                yield _vector(f"{block}.{norm}.weight", 1.0, self.head_dim)
        else:
            sizes = {"q": n_q, "k": n_kv, "v": n_kv, "output": self.n_embd}
            has_bias = {"glm4moe": "qkv", "gpt-oss": ("q", "k", "v", "output")}.get(self.architecture, "")
            yield from (_vector(f"{block}.attn_{part}.bias", 0.0, sizes[part]) for part in has_bias)
        if self.architecture == "gpt-oss":
            yield _vector(f"{block}.attn_sinks.weight", 0.0, self.n_heads)

    def _norms(self, block: str) -> Iterator[RandomTensor]:
        is_other = self.architecture in ("glm4moe", "gpt-oss", "qwen3next")
        for norm in ("attn_norm", "post_attention_norm" if is_other else "ffn_norm"):
            yield _vector(f"{block}.{norm}.weight", 1.0, self.n_embd)

    def _delta_tensors(self, block: str, delta: DeltaShape, form: Format) -> Iterator[RandomTensor]:
        n_inner = delta.n_values * delta.head_dim
        n_channels = 2 * delta.n_keys * delta.head_dim + n_inner
        sizes = {
            "attn_qkv": (n_channels, self.n_embd),
            "attn_gate": (n_inner, self.n_embd),
            "ssm_ba": (2 * delta.n_values, self.n_embd),
            "ssm_out": (self.n_embd, n_inner),
        }
        yield from (RandomTensor(f"{block}.{name}.weight", shape, form) for name, shape in sizes.items())
        yield RandomTensor(f"{block}.ssm_conv1d.weight", (n_channels, delta.n_taps), get_format("F32"))
        yield _vector(f"{block}.ssm_dt.bias", 0.0, delta.n_values)
        yield _vector(f"{block}.ssm_a", -0.1, delta.n_values)
        yield _vector(f"{block}.ssm_norm.weight", 1.0, delta.head_dim)
        yield from self._norms(block)

    def _expert_vectors(self, block: str, experts: ExpertShape) -> Iterator[RandomTensor]:
        n_experts = experts.n_experts
        if self.architecture == "qwen3next":
            yield _vector(f"{block}.ffn_gate_inp_shexp.weight", 0.01, self.n_embd)
        if self.architecture == "glm4moe":
            yield _vector(f"{block}.exp_probs_b.bias", 0.0, n_experts)
        if self.architecture == "gpt-oss":
            yield _vector(f"{block}.ffn_gate_inp.bias", 0.0, n_experts)
            for part, size in (("gate", experts.n_ff), ("up", experts.n_ff), ("down", self.n_embd)):
                yield _vector(f"{block}.ffn_{part}_exps.bias", 0.0, n_experts, size)


def _vector(name: str, fill: float, *shape: int) -> RandomTensor:
    return RandomTensor(name, shape, get_format("F32"), fill)


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "llama-15m": Shape(6, 288, 768, 6, 6, 48, 32000),
        "llama-160m": Shape(12, 768, 2048, 12, 12, 64, 32000),
        "llama-1b": Shape(16, 2048, 8192, 32, 8, 64, 32000),
        "llama-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256),
        "qwen3-30b-a3b": Shape(
            *(48, 2048, 6144, 32, 4, 128, 151936), architecture="qwen3moe", experts=ExpertShape(128, 8, 768)
        ),
        "glm-4.5-air": Shape(
            *(46, 4096, 10944, 96, 8, 128, 151552),
            architecture="glm4moe",
            experts=ExpertShape(128, 8, 1408, n_ff_shared=1408, n_dense_layers=1),
        ),
        "qwen3-next-80b-a3b": Shape(
            *(48, 2048, 5120, 16, 2, 256, 151936),
            architecture="qwen3next",
            experts=ExpertShape(512, 10, 512, n_ff_shared=512),
            delta=DeltaShape(16, 32, 128),
            n_rope=64,
        ),
        "gpt-oss-20b": Shape(
            *(24, 2880, 2880, 64, 8, 64, 201088),
            architecture="gpt-oss",
            experts=ExpertShape(32, 4, 2880, weights="MXFP4"),
        ),
    }
)
