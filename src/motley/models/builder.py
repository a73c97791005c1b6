"""What model files build with: the batch's inputs, weights by name, and the parts that decoders share."""

from __future__ import annotations

from dataclasses import dataclass

from motley.errors import ModelError
from motley.gguf import ModelSpec
from motley.graph import CACHE, I32, Tensor
from motley.graph.ops import (
    Add,
    Attention,
    CacheStore,
    GetRows,
    Hadamard,
    Input,
    MatMul,
    Reshape,
    RmsNorm,
    Weight,
)
from motley.models.params import DecoderParams, tensor_info

Ranges = tuple[tuple[int, int], ...]


def cache_name(layer: int) -> str:
    """Of a layer's cache among the graph's inputs."""
    return f"cache.{layer}"


def cache_layer(name: str) -> int:
    """The layer whose cache has that name."""
    return int(name.removeprefix("cache."))


@dataclass(frozen=True)
class BatchShape:
    """All of a batch that shapes depend on; everything else in it is data."""

    n_tokens: int
    n_outputs: int  # rows that want logits


@dataclass(frozen=True)
class GraphOptions:
    """What graphs depend on besides the model and the batch; model files do not look at it."""

    n_ctx: int
    kv_repeat: int = 1  # each KV head is stored that many times, for as many devices to share its queries
    k_rotation: int = 0  # size of the Hadamard matrix that turns keys (and queries); 0: none
    v_rotation: int = 0  # the same for values (and the attention's output)


def rotation_size(head_dim: int) -> int:
    """The largest power of two that divides `head_dim`; 0 if that is below 32, a quantizer's block."""
    size = head_dim & -head_dim
    return size if size >= 32 else 0


class ModelBuilder:
    """Builds one graph. Weights are made once each, checked against the file's table."""

    def __init__(
        self, spec: ModelSpec, params: DecoderParams, batch: BatchShape, options: GraphOptions
    ) -> None:
        self.spec = spec
        self.params = params
        self.batch = batch
        self.options = options
        self.tokens = Input((batch.n_tokens,), I32)(name="tokens")
        self.positions = Input((batch.n_tokens,), I32)(name="positions")
        self.output_rows = Input((batch.n_outputs,), I32)(name="output_rows")
        self._weights: dict[str, Tensor] = {}
        self._hadamard: Tensor | None = None  # of the one size that all heads share

    def weight(self, name: str, *shape: int, source: str | None = None, rows: Ranges = ()) -> Tensor:
        """The weight `name`, which has `shape` in the file, under the name `source` if that is another.

        `rows` chooses and repeats rows of it (see the op `Weight`).
        """
        if name not in self._weights:
            info = tensor_info(self.spec, source or name)
            if info.shape != shape:
                raise ModelError(
                    f"{self.spec.path}: tensor {info.name!r} has shape {info.shape}, "
                    f"but the model's metadata asks for {shape}"
                )
            size = (sum(stop - start for start, stop in rows), *shape[1:]) if rows else shape
            self._weights[name] = Weight(size, info.format.name, info.name, rows)(name=name)
        return self._weights[name]

    def optional_weight(self, name: str, *shape: int, rows: Ranges = ()) -> Tensor | None:
        return self.weight(name, *shape, rows=rows) if name in self.spec.tensors else None

    def rotate(self, x: Tensor, size: int) -> Tensor:
        """Spread outliers of each head over `size` dims; rotating twice gives x back. (tokens, heads, dim)"""
        if not size:
            return x
        self._hadamard = self._hadamard or Hadamard(size)(name=f"hadamard.{size}")
        rows = Reshape((x.n_values // size, size))(x)
        return Reshape(x.shape)(MatMul()(rows, self._hadamard))

    def layer(self, index: int) -> LayerBuilder:
        return LayerBuilder(self, index)

    def embedding(self) -> Tensor:
        """(tokens, embd)"""
        p = self.params
        return GetRows()(self.weight("token_embd.weight", p.n_vocab, p.n_embd), self.tokens, name="embedding")

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and output matrix, for the rows that want logits. (outputs, vocab)"""
        p = self.params
        x = GetRows()(x, self.output_rows, name="output_hidden")
        x = RmsNorm(p.norm_eps)(x, self.weight("output_norm.weight", p.n_embd), name="output_norm")
        source = "output.weight" if "output.weight" in self.spec.tensors else "token_embd.weight"  # tied
        weight = self.weight("output.weight", p.n_vocab, p.n_embd, source=source)
        return MatMul()(x, weight, name="logits")


class LayerBuilder:
    """One layer's weights by their short names, and names for its tensors."""

    def __init__(self, model: ModelBuilder, index: int) -> None:
        self.model = model
        self.params = model.params
        self.index = index

    def label(self, name: str) -> str:
        return f"blk.{self.index}.{name}"

    def linear(self, x: Tensor, name: str, n_out: int, rows: Ranges = ()) -> Tensor:
        """x·Wᵀ (+ bias, where the file has one), for all `n_out` rows of W or for `rows` of them."""
        weight = self.model.weight(self.label(f"{name}.weight"), n_out, x.shape[-1], rows=rows)
        out = MatMul()(x, weight, name=self.label(name))
        bias = self.model.optional_weight(self.label(f"{name}.bias"), n_out, rows=rows)
        return out if bias is None else Add()(out, bias, name=self.label(f"{name}+bias"))

    def kv_rows(self, n_before: int, n_heads: int) -> Ranges:
        """Rows of a matrix that has `n_before` other rows and then KV heads: each head as often as it is stored."""
        dim, repeat = self.params.head_dim, self.model.options.kv_repeat
        if repeat == 1:
            return ()
        heads = [
            (n_before + h * dim, n_before + (h + 1) * dim) for h in range(n_heads) for _ in range(repeat)
        ]
        return ((0, n_before), *heads) if n_before else tuple(heads)

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.model.weight(self.label(f"{name}.weight"), x.shape[-1])
        return RmsNorm(self.params.norm_eps)(x, weight, name=self.label(name))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        """Store k and v (tokens, kv heads, dim) and attend with q (tokens, heads, dim) → (tokens, heads, dim)."""
        options = self.model.options
        q, k = (self.model.rotate(t, options.k_rotation) for t in (q, k))
        v = self.model.rotate(v, options.v_rotation)
        cache = Input(k.shape[1:], CACHE)(name=cache_name(self.index))
        stored = CacheStore()(cache, k, v, name=self.label("kv"))
        attended = Attention(self.params.attention_scale, window)(q, stored, name=self.label("attention"))
        return self.model.rotate(attended, options.v_rotation)
