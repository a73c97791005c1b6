"""`Graph`: all tensors that its outputs depend on, in topological order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from motley.errors import GraphError
from motley.graph.ops.sources import Input, Weight
from motley.graph.tensor import Tensor


@dataclass(frozen=True)
class Graph:
    """`nodes` holds each tensor once, inputs before users; `outputs` are in the order given."""

    nodes: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @staticmethod
    def of(*outputs: Tensor) -> Graph:
        graph = Graph(tuple(in_order(outputs)), outputs)
        graph.verify()
        return graph

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.nodes if isinstance(t.op, Input))

    @cached_property
    def weights(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.nodes if isinstance(t.op, Weight))

    def verify(self) -> None:
        """Check every node against its op's rules and the order of nodes; raises GraphError."""
        seen: set[Tensor] = set()
        for node in self.nodes:
            late = [t for t in node.inputs if t not in seen]
            if late:
                raise GraphError(f"{node!r} stands before its input {late[0]!r}")
            shape, dtype = node.op.shape(node.inputs), node.op.dtype(node.inputs)
            if (shape, dtype) != (node.shape, node.dtype):
                raise GraphError(f"{node!r} should be {dtype} {shape} by the rule of {node.op.name}")
            seen.add(node)
        missing = [t for t in self.outputs if t not in seen]
        if missing:
            raise GraphError(f"output {missing[0]!r} is not among the nodes")
        names = Counter(t.name for t in self.nodes if isinstance(t.op, Input | Weight))
        twice = [name for name, n in names.items() if n > 1]
        if twice:
            raise GraphError(
                f"two inputs or weights are called {twice[0]!r}; make the tensor once and use it twice"
            )

    def __str__(self) -> str:
        labels = {t: t.name or f"%{i}" for i, t in enumerate(self.nodes)}
        rows = []
        for node in self.nodes:
            arguments = ", ".join(labels[t] for t in node.inputs)
            attributes = f" {{{node.op.attributes}}}" if node.op.attributes else ""
            shape = "×".join(map(str, node.shape))
            rows.append(
                f"{labels[node]:<28} {node.dtype:>6} {shape:<16} {node.op.name}({arguments}){attributes}"
            )
        return "\n".join(rows)


def in_order(outputs: Iterable[Tensor]) -> list[Tensor]:
    """All tensors that `outputs` depend on, inputs before users. No recursion: graphs are thousands of nodes deep."""
    order: list[Tensor] = []
    done: set[Tensor] = set()
    stack = [(t, False) for t in reversed(list(outputs))]
    while stack:
        tensor, is_ready = stack.pop()
        if tensor in done:
            continue
        if is_ready:
            done.add(tensor)
            order.append(tensor)
        else:
            stack.append((tensor, True))
            stack.extend((t, False) for t in reversed(tensor.inputs))
    return order
