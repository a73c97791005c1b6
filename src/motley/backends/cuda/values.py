"""Values of nodes during one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from motley.backends.cuda.kernels.rows import HALVES, INT8, PLAIN, Rows, convert
from motley.graph import Tensor


class Values:
    """By node: float32 tensors, rows in a product's form, or both."""

    def __init__(self, fixed: Mapping[Tensor, Any]) -> None:
        self._plain: dict[Tensor, Any] = dict(fixed)
        self._rows: dict[tuple[Tensor, str], Rows] = {}

    def put(self, node: Tensor, value: Any) -> None:
        if isinstance(value, Rows) and value.form != PLAIN:
            self._rows[node, value.form] = value
        else:
            self._plain[node] = value.values if isinstance(value, Rows) else value

    def plain(self, node: Tensor) -> Any:
        return self._plain[node]

    def rows(self, node: Tensor, form: str) -> Rows:
        """In that form; made from float32, once, where no kernel left it so."""
        if (node, form) not in self._rows:
            x = self._plain[node].contiguous()
            self._rows[node, form] = convert(x, Rows.empty(form, x.shape[0], x.shape[1], x.device))
        return self._rows[node, form]

    def forget(self, nodes: Iterable[Tensor]) -> None:
        for node in nodes:
            self._plain.pop(node, None)
            for form in (INT8, HALVES):
                self._rows.pop((node, form), None)
