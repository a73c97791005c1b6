"""The role of a weight. Models declare it when they build the weight; placement uses roles, never names."""

from __future__ import annotations

from dataclasses import dataclass

# Groups: weights of one group and one layer are split together, because one computation uses them all.
WHOLE = "whole"  # norms, small vectors: every device holds all of them
HEADS = "heads"  # attention: cut at KV heads with their query groups
DELTA = "delta"  # a gated delta net: cut at key heads with their value heads
FFN = "ffn"  # a dense FFN: cut at columns of its hidden layer
SHARED_FFN = "shared_ffn"  # the FFN of the shared expert
EXPERTS = "experts"  # cut at columns of each expert's hidden layer, or at whole experts (axis 0)
ROUTER = "router"  # the router and the biases of experts: whole on every device that has experts
EMBEDDING = "embedding"  # the token embedding: rows are looked up by id
OUTPUT = "output"  # the norm after the last layer
VOCABULARY = "vocabulary"  # the output matrix: cut at rows

# Units of a weight's split axis.
QUERIES = "queries"  # dims of query heads
KEYS = "keys"  # dims of KV heads
QUERY_HEADS = "query_heads"  # one value per query head
GATED_QUERIES = "gated_queries"  # of each query head its dims, then as many of its gate
DELTA_KEYS = "delta_keys"  # dims of a delta net's key heads
DELTA_VALUES = "delta_values"  # dims of its value heads
DELTA_HEADS = "delta_heads"  # one value per value head
DELTA_GATES = "delta_gates"  # of each key head two values per value head of it
COLUMNS = "columns"  # of an FFN's hidden layer


@dataclass(frozen=True)
class Role:
    """`axis` may be split; `units` are the kinds of its runs, in order (a fused QKV matrix has three)."""

    group: str = WHOLE
    layer: int | None = None  # None: outside of layers
    axis: int = 0
    units: tuple[str, ...] = ()


EVERYWHERE = Role()
