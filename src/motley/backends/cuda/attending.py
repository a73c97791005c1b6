"""Attention's stage: into the cache, over it, and out again as rows."""

from __future__ import annotations

import torch

from motley.backends.cuda.kernels import attention as attention_kernel
from motley.backends.cuda.kernels.attention import Shares
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.enter import RopeTable, enter
from motley.backends.cuda.kernels.prefill import prefill
from motley.backends.cuda.kernels.rows import INT8, PLAIN, Rows
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.backends.cuda.lowering import Attend
from motley.backends.cuda.staging import Place
from motley.backends.cuda.values import Values
from motley.backends.paged import PagedLayer
from motley.graph.ops.rope import HALVES as ROPE_HALVES


class Attending:
    """One `Attend` stage on a device. Its output is in the form that its reader wants, where it can be."""

    def __init__(self, stage: Attend, divisors: list[torch.Tensor], form: str, device: torch.device) -> None:
        rope = stage.rope
        self._stage = stage
        self._device = device
        self._rope = RopeTable(
            rope.frequencies(*divisors).to(device), rope.n_dims, rope.style == ROPE_HALVES, rope.magnitude
        )
        self._form = INT8 if form == INT8 else PLAIN
        self._layer: PagedLayer | None = None
        self._keys: CachePlanes
        self._values: CachePlanes

    def __call__(self, values: Values) -> None:
        stage = self._stage
        (q, k, v, positions, cache, *_), (out,) = stage.inputs, stage.outputs
        if not out.n_values:  # this device has no heads
            values.put(out, torch.empty(out.shape, device=self._device))
            return
        layer, place = values.plain(cache)
        if layer is not self._layer:
            self._bind(layer)
        turned = torch.empty(q.shape, device=self._device)
        enter(
            values.plain(q), values.plain(k), values.plain(v), values.plain(positions), place.slots, self._rope,
            self._keys, self._values, layer.rows, turned,
            rotate_k=stage.rotates_k, rotate_v=stage.rotates_v, turn=stage.turn,
        )  # fmt: skip
        if place.is_decode:
            rows = Rows.empty(self._form, out.shape[0], out.shape[1], self._device)
            values.put(out, self._decode(turned, layer, place, rows))
        else:
            values.put(out, self._mixed(turned, layer, place).reshape(out.shape))

    def _bind(self, layer: PagedLayer) -> None:
        """The first batch says which layer of the cache it is; all others have the same."""
        self._keys, self._values = (
            CachePlanes.of(store.kind.name, store.planes) for store in (layer.keys, layer.values)
        )
        self._layer = layer

    def _decode(self, q: torch.Tensor, layer: PagedLayer, place: Place, out: Rows) -> Rows:
        n_rows, n_heads, dim = q.shape
        op, n_kv_heads = self._stage.attention, layer.rows.stop - layer.rows.start
        n_splits = attention_kernel.TUNINGS[self._values.kind].n_splits(n_rows, n_kv_heads)
        shares = Shares.empty(n_rows, n_heads, n_splits, dim, self._device)
        attention_kernel.attend(
            q, self._keys, self._values, layer.rows, place.tables, shares, scale=op.scale, window=op.window
        )
        size, turns = layer.keys.block_size, self._stage.rotates_v
        return combine(shares, place.tables, size, out, rotate=turns, turn=self._stage.turn, window=op.window)

    def _mixed(self, q: torch.Tensor, layer: PagedLayer, place: Place) -> torch.Tensor:
        """Sequences with many rows all at once, the others as in decode."""
        out, stage = torch.empty_like(q), self._stage
        if len(place.single_rows):
            some = q[place.single_rows]
            rows = Rows.empty(PLAIN, len(some), some[0].numel(), self._device)
            out[place.single_rows] = self._decode(some, layer, place, rows).values.view(some.shape)
        prefill(
            q, self._keys, self._values, layer.rows, place.numbers, place.spans, out,
            span_rows=place.span_rows, scale=stage.attention.scale, window=stage.attention.window,
            rotate=stage.rotates_v, turn=stage.turn,
        )  # fmt: skip
        return out
