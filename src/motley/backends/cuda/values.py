"""Values of nodes during one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from motley.backends.cuda.kernels.rows import PLAIN, Rows, convert
from motley.graph import Tensor
from motley.plan import without_views


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of runtime.group, with the same bits."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class Values:
    """The values of nodes and of views of them: float32 tensors, rows in a product's form, or both."""

    def __init__(self, fixed: Mapping[Tensor, Any]) -> None:
        self._plain: dict[Tensor, Any] = dict(fixed)
        self._rows: dict[tuple[Tensor, str, int], Rows] = {}  # by node, form and number of rows
        self._sums: dict[Tensor, Sequence[torch.Tensor]] = {}  # of what is not yet added up

    def put(self, node: Tensor, value: Any) -> None:
        self._sums.pop(node, None)
        if isinstance(value, Rows) and value.form != PLAIN:
            self._rows[node, value.form, value.n_rows] = value
        else:
            values = value.values if isinstance(value, Rows) else value
            self._plain[node] = values if values.shape == node.shape else values.view(node.shape)

    def put_sum(self, node: Tensor, parts: Sequence[torch.Tensor]) -> None:
        """The node is the sum of these, which its first reader makes."""
        self._sums[node] = parts

    def addends(self, node: Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The two tensors of which the node is the sum, if nothing has added them up yet."""
        parts = self._sums.get(without_views(node), ())
        return (parts[0], parts[1]) if len(parts) == 2 and all(p.is_contiguous() for p in parts) else None

    def plain(self, node: Tensor) -> Any:
        base = without_views(node)
        if base in self._sums:
            self.put(base, sum_in_order(self._sums[base]))
        return self._plain[base] if base is node else self._plain[base].reshape(node.shape)

    def some(self, nodes: Iterable[Tensor]) -> dict[Tensor, Any]:
        """The float32 tensors of nodes that have one, each by the node that it is a view of."""
        bases = map(without_views, nodes)
        return {base: self._plain[base] for base in bases if base in self._plain}

    def rows(self, node: Tensor, form: str) -> Rows:
        """The rows in that form. If no kernel has made it, it is made once, from float32."""
        if form == PLAIN:
            x = self.plain(node).contiguous()
            return Rows(PLAIN, x, x, x)
        key = without_views(node), form, node.shape[0]
        if key not in self._rows:
            x = self.plain(node).contiguous()
            self._rows[key] = convert(x, Rows.empty(form, x.shape[0], x.shape[1], x.device))
        return self._rows[key]

    def forget(self, nodes: Iterable[Tensor]) -> None:
        for node in nodes:
            self._plain.pop(node, None)
            self._sums.pop(node, None)
        gone = set(nodes)
        for key in [key for key in self._rows if key[0] in gone]:
            del self._rows[key]
