"""`ModelBuilder` and `LayerBuilder`: the batch's inputs, weights by name, and the parts common to all decoders."""

from __future__ import annotations

from dataclasses import dataclass

from motley.errors import ModelError
from motley.gguf import ModelSpec
from motley.graph import I32, Tensor
from motley.graph.ops import (
    Activation,
    Add,
    Attention,
    CacheInput,
    CacheStore,
    GetRows,
    Hadamard,
    Input,
    MatMul,
    Reshape,
    RmsNorm,
    Scale,
    Weight,
)
from motley.graph.roles import EMBEDDING, HEADS, OUTPUT, QUERY_HEADS, ROUTER, VOCABULARY, WHOLE, Role
from motley.models.params import INCOMPLETE, DecoderParams, format_name, tensor_info

Ranges = tuple[tuple[int, int], ...]

N_EXPERT_USED = "n_expert_used"  # an input of graphs that have experts
HIDDEN = "hidden"  # an input of multi-token prediction layers: the model's hidden states


@dataclass(frozen=True)
class BatchShape:
    """The sizes of a batch that tensor shapes depend on. Everything else in the batch is data."""

    n_tokens: int
    n_outputs: int  # rows for which logits are computed
    n_layers: int = 0  # number of layers that run, from the first; 0: all
    n_experts: int = 0  # maximum per token; 0: the file's number
    wants_hidden: bool = False  # the output is the hidden state after the final norm, instead of logits
    keeps_hidden: bool = False  # a second output: the hidden states after the final norm, of all tokens


@dataclass(frozen=True)
class GraphOptions:
    """Options of a graph besides the model and the batch. Model files do not read them."""

    n_ctx: int
    kv_repeat: int = 1  # copies of each KV head; its query heads are split over that many devices
    k_rotation: int = 0  # size of the Hadamard matrix that rotates keys (and queries); 0: none
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
        self.n_layers = batch.n_layers or params.n_layers
        self.hidden: Tensor | None = None  # the second output, if the batch keeps hidden states
        self._weights: dict[str, Tensor] = {}
        self._needed: frozenset[str] = frozenset()
        self._layer_has: dict[
            str, tuple[str, bool]
        ] = {}  # by name: the first layer's tensor, whether it is there
        self._n_expert_used: Tensor | None = None
        self._hadamard: Tensor | None = None  # all heads have the same size, so one matrix is enough

    def weight(
        self,
        name: str,
        *shape: int,
        role: Role,
        source: str | None = None,
        rows: Ranges = (),
        middle: tuple[int, int] | None = None,
    ) -> Tensor:
        """The weight `name`. The file stores it with `shape`, under the name `source` if that is given.

        `role` is its use in the model; `rows` chooses and repeats rows of it, `middle` a range of its axis 1 (see the
        op `Weight`).
        """
        if name not in self._weights:
            info = tensor_info(self.spec, source or name)
            if shape not in (info.shape, (1, *info.shape)):  # a matrix of one row may be stored as a vector
                raise ModelError(
                    f"{self.spec.path}: tensor {info.name!r} has shape {info.shape}, "
                    f"but the model's metadata asks for {shape}"
                )
            size = (sum(stop - start for start, stop in rows), *shape[1:]) if rows else shape
            if middle is not None:
                size = (size[0], middle[1] - middle[0], *size[2:])
            stored = format_name(self.spec, info)
            self._weights[name] = Weight(size, stored, info.name, rows, role, middle)(name=name)
        return self._weights[name]

    def optional_weight(self, name: str, *shape: int, role: Role) -> Tensor | None:
        return self.weight(name, *shape, role=role) if self.has(name) else None

    def needs(self, *names: str) -> None:
        """Declares tensors that are optional elsewhere and that all models of this architecture have: `attn_q.bias`."""
        self._needed = frozenset(names)

    def has(self, name: str) -> bool:
        """Whether the model has this tensor, which not all models have."""
        return name in self._needed or name in self.spec.tensors

    def layer_has(self, label: str, name: str) -> bool:
        """The same of a layer's tensor `name`. All layers that ask must have it, or none: otherwise ModelError."""
        found = name in self._needed or label in self.spec.tensors
        first, was_found = self._layer_has.setdefault(name, (label, found))
        if found != was_found:
            there, missing = (label, first) if found else (first, label)
            raise self.missing(missing, there)
        return found

    def missing(self, label: str, there: str) -> ModelError:
        """The error about a tensor that is missing although another one is there."""
        message = f"the tensor {label!r} is missing, but {there!r} is in the file"
        return ModelError(f"{self.spec.path}: {message}", hint=INCOMPLETE)

    @property
    def n_expert_used(self) -> Tensor:
        """How many experts each token uses. (tokens,)"""
        self._n_expert_used = self._n_expert_used or Input((self.batch.n_tokens,), I32)(name=N_EXPERT_USED)
        return self._n_expert_used

    def rotate(self, x: Tensor, size: int) -> Tensor:
        """x with each head multiplied by a Hadamard matrix of `size`. (tokens, heads, dim)

        This spreads outliers over `size` dims. Rotating twice gives x back.
        """
        if not size:
            return x
        self._hadamard = self._hadamard or Hadamard(size)(name=f"hadamard.{size}")
        rows = Reshape((x.n_values // size, size))(x)
        return Reshape(x.shape)(MatMul()(rows, self._hadamard))

    def layer(self, index: int) -> LayerBuilder:
        return LayerBuilder(self, index)

    def embedding(self) -> Tensor:
        """The embeddings of the batch's tokens. (tokens, embd)"""
        p = self.params
        table = self.weight("token_embd.weight", p.n_vocab, p.n_embd, role=Role(EMBEDDING))
        return GetRows()(table, self.tokens, name="embedding")

    def logits(self, x: Tensor) -> Tensor:
        """Logits: final norm and output matrix, for the output rows only. (outputs, vocab)

        If the batch needs the hidden state, it ends after the norm. (outputs, embd)
        """
        norm = self.weight("output_norm.weight", self.params.n_embd, role=Role(OUTPUT))
        x = self.output_hidden(x, norm)
        if self.batch.wants_hidden:
            return x
        source = "output.weight" if self.has("output.weight") else "token_embd.weight"  # tied
        return self.head(x, source)

    def output_hidden(self, x: Tensor, norm: Tensor) -> Tensor:
        """The output rows of x after the final norm; of all rows the graph keeps them, if the batch says so."""
        final = RmsNorm(self.params.norm_eps)
        if not self.batch.keeps_hidden:
            return final(GetRows()(x, self.output_rows, name="output_hidden"), norm, name="output_norm")
        self.hidden = final(x, norm, name="output_norm")
        return GetRows()(self.hidden, self.output_rows, name="output_hidden")

    def head(self, x: Tensor, source: str) -> Tensor:
        """Logits of x, which is after the final norm, by the output matrix `source`."""
        p = self.params
        weight = self.weight("output.weight", p.n_vocab, p.n_embd, role=Role(VOCABULARY), source=source)
        return self._soft_capped(MatMul()(x, weight, name="logits"))

    def _soft_capped(self, logits: Tensor) -> Tensor:
        """cap · tanh(logits / cap) if the file has a cap; otherwise `logits`."""
        cap = self.params.logit_softcap
        if cap is None:
            return logits
        return Scale(cap)(Activation("tanh")(Scale(1 / cap)(logits)), name="capped_logits")


class LayerBuilder:
    """Makes one layer's weights from their short names, and names the layer's tensors."""

    def __init__(self, model: ModelBuilder, index: int) -> None:
        self.model = model
        self.params = model.params
        self.index = index

    def label(self, name: str) -> str:
        return f"blk.{self.params.first_block + self.index}.{name}"

    def role(self, group: str = WHOLE, axis: int = 0, *units: str) -> Role:
        """The role of a weight of this layer."""
        return Role(group, self.index, axis, units)

    def has(self, name: str) -> bool:
        """Whether the model has this layer's tensor `name`, which not all models have."""
        return self.model.layer_has(self.label(name), name)

    def all_or_none(self, *names: str) -> None:
        """ModelError if the layer has some of these tensors and not the others."""
        labels = [self.label(name) for name in names]
        missing = [label for label in labels if label not in self.model.spec.tensors]
        if missing and len(missing) < len(labels):
            there = next(label for label in labels if label not in missing)
            raise self.model.missing(missing[0], there)

    def is_fused(self, fused: str, *parts: str) -> bool:
        """Whether the file has this layer's tensor `fused` instead of `parts`. ModelError if it has none of them."""
        tensors = self.model.spec.tensors
        if self.label(fused) in tensors:
            return True
        if any(self.label(part) in tensors for part in parts):
            return False
        raise ModelError(
            f"{self.model.spec.path}: the tensors {', '.join(repr(self.label(part)) for part in parts)} are missing, "
            f"and so is {self.label(fused)!r}, which may stand for them",
            hint=INCOMPLETE,
        )

    def vector(self, name: str, *shape: int, role: Role | None = None) -> Tensor:
        return self.model.weight(self.label(name), *shape, role=role or self.role())

    def linear(self, x: Tensor, name: str, n_out: int, role: Role, rows: Ranges = ()) -> Tensor:
        """x·Wᵀ (+ bias, where the file has one), for all `n_out` rows of W or for `rows` of them."""
        weight = self.model.weight(self.label(f"{name}.weight"), n_out, x.shape[-1], role=role, rows=rows)
        out = MatMul()(x, weight, name=self.label(name))
        bias_role = role if role.group == ROUTER else self.role()
        if not self.has(f"{name}.bias"):
            return out
        bias = self.model.weight(self.label(f"{name}.bias"), n_out, role=bias_role, rows=rows)
        return Add()(out, bias, name=self.label(f"{name}+bias"))

    def kv_rows(self, n_before: int, n_heads: int) -> Ranges:
        """Row ranges of `n_before` rows and the KV heads after them, each head `kv_repeat` times; (): all rows once."""
        dim, repeat = self.params.head_dim, self.model.options.kv_repeat
        if repeat == 1:
            return ()
        heads = [
            (n_before + h * dim, n_before + (h + 1) * dim) for h in range(n_heads) for _ in range(repeat)
        ]
        return ((0, n_before), *heads) if n_before else tuple(heads)

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.vector(f"{name}.weight", x.shape[-1])
        return RmsNorm(self.params.norm_eps)(x, weight, name=self.label(name))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, scale: float | None = None
    ) -> Tensor:
        """Store k and v (tokens, kv heads, dim) and attend with q (tokens, heads, dim) → (tokens, heads, dim).

        `scale`: factor of the scores. Default: the model's usual one.
        """
        options = self.model.options
        q, k = (self.model.rotate(t, options.k_rotation) for t in (q, k))
        v = self.model.rotate(v, options.v_rotation)
        cache = CacheInput.of(self.index, k.shape[1:])
        stored = CacheStore()(cache, k, v, name=self.label("kv"))
        sinks = []
        if self.has("attn_sinks.weight"):
            role = self.role(HEADS, 0, QUERY_HEADS)
            sinks = [self.vector("attn_sinks.weight", self.params.n_heads, role=role)]
        attention = Attention(scale or self.params.attention_scale, window)
        attended = attention(q, stored, *sinks, name=self.label("attention"))
        return self.model.rotate(attended, options.v_rotation)
