"""Multi-token prediction (nextn): a layer after the others that guesses the token after the next one.

It gets the hidden state h of a token, after the final norm, and the token that follows it. Its own hidden state serves
as h for the token after that, so it can continue with its own guesses.
"""

from __future__ import annotations

from collections.abc import Callable

from motley.graph import F32, Tensor
from motley.graph.ops import Concat, GetRows, Input
from motley.graph.roles import EMBEDDING, OUTPUT, Role
from motley.models.builder import HIDDEN, LayerBuilder, ModelBuilder


def build_nextn(builder: ModelBuilder, run_layer: Callable[[LayerBuilder, Tensor], Tensor]) -> Tensor:
    """head(norm(layer(eh_proj · [enorm(embedding), hnorm(h)]))) → logits. `run_layer`: the architecture's own layer."""
    p, layer = builder.params, builder.layer(0)
    own, shared = layer.label("nextn.embed_tokens.weight"), "token_embd.weight"
    table = builder.weight(
        "token_embd.weight", p.n_vocab, p.n_embd, role=Role(EMBEDDING), source=_first(builder, own, shared)
    )
    embedding = GetRows()(table, builder.tokens, name="embedding")
    hidden = Input((builder.batch.n_tokens, p.n_embd), F32)(name=HIDDEN)
    both = Concat(1)(layer.norm(embedding, "nextn.enorm"), layer.norm(hidden, "nextn.hnorm"))
    x = run_layer(layer, layer.linear(both, "nextn.eh_proj", p.n_embd, layer.role()))
    norm_source = _first(builder, layer.label("nextn.shared_head_norm.weight"), "output_norm.weight")
    norm = builder.weight("output_norm.weight", p.n_embd, role=Role(OUTPUT), source=norm_source)
    head = _first(builder, layer.label("nextn.shared_head_head.weight"), "output.weight", shared)
    return builder.head(builder.output_hidden(x, norm), head)


def _first(builder: ModelBuilder, *names: str) -> str:
    """The first of these tensors that the file has; the last one if it has none of them."""
    return next((name for name in names if name in builder.spec.tensors), names[-1])
