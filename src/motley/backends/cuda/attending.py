"""Attention's stage: into the cache, over it, and out again as rows."""

from __future__ import annotations

import torch

from motley.backends.cuda import library_attention
from motley.backends.cuda.compiling import is_recording
from motley.backends.cuda.kernels import attention as attention_kernel
from motley.backends.cuda.kernels import bundles
from motley.backends.cuda.kernels.attention import Shares
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.prefill import prefill
from motley.backends.cuda.kernels.rope_and_store import HeadNorms, RopeTable, has_whole_rows, rope_and_store
from motley.backends.cuda.kernels.rows import HALVES, PLAIN, Rows
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.backends.cuda.staging import Place
from motley.backends.cuda.values import Values
from motley.backends.paged import PagedLayer
from motley.plan import AttentionBlock

_FEW_HEADS = 32  # bundles times KV heads for which the GPU has programs to spare
_WIDE_KINDS = ("f32", "bf16")  # of caches whose values float16 may not hold
_SCALE = 32  # of results as halves: totals of 32 values that float16 holds do not overflow, either


class Attending:
    """One `AttentionBlock` on a device. Its output is in the form that its reader needs, if possible."""

    def __init__(
        self,
        stage: AttentionBlock,
        rope: RopeTable,
        form: str,
        device: torch.device,
        sinks: torch.Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> None:
        self._stage = stage
        self._rotates_k, self._rotates_v = stage.q.rotation > 0, stage.attention.rotation > 0
        self._rotation = stage.q.rotation or stage.attention.rotation
        self._device = device
        self._sinks = sinks
        self._norms = norms
        self._rope = rope
        self._form = form
        self._layer: PagedLayer | None = None
        self._keys: CachePlanes
        self._values: CachePlanes

    def __call__(self, values: Values) -> None:
        stage = self._stage
        q, k, v, positions, (out,) = stage.queries, stage.keys, stage.values, stage.q.inputs[1], stage.outputs
        if not out.n_values:  # this device has no heads
            values.put(out, torch.empty(out.shape, device=self._device))
            return
        layer, place = values.plain(stage.cache)
        if layer is not self._layer:
            self._bind(layer)
        rotated = torch.empty(q.shape, device=self._device)
        heads = [_by_heads(values.plain(x)) for x in (q, k, v)]
        rope_and_store(
            heads[0], heads[1], heads[2], values.plain(positions), place.slots, self._rope,
            self._keys, self._values, layer.rows, rotated,
            rotate_k=self._rotates_k, rotate_v=self._rotates_v, rotation=self._rotation,
            norms=self._norms,
        )  # fmt: skip
        if place.is_decode:
            # A result is a mean of cached values: where float16 holds these, it holds the result.
            form = PLAIN if self._form == HALVES and self._values.kind in _WIDE_KINDS else self._form
            rows = Rows.empty(form, q.shape[0], q.shape[1] * q.shape[2], self._device, fixed=_SCALE)
            values.put(out, self._decode(rotated, layer, place, rows))
        else:
            values.put(out, self._mixed(rotated, layer, place))

    def _bind(self, layer: PagedLayer) -> None:
        """The first batch brings the layer of the cache; all later batches bring the same one."""
        self._keys, self._values = (
            CachePlanes.of(store.kind.name, store.planes) for store in (layer.keys, layer.values)
        )
        self._layer = layer

    def _decode(self, q: torch.Tensor, layer: PagedLayer, place: Place, out: Rows) -> Rows:
        n_rows, n_heads, dim = q.shape
        op, n_kv_heads = self._stage.op, layer.rows.stop - layer.rows.start
        tables, kinds = place.tables, (self._keys.kind, self._values.kind)
        n_bundles, n_queries = len(tables.table), tables.most_rows * n_heads // n_kv_heads
        # A single request would read the blocks of its context one after the other: split even short contexts.
        min_blocks = 1 if n_bundles * n_kv_heads <= _FEW_HEADS else 4
        given = q, self._keys, self._values, layer.rows, tables
        if tables.most_rows > 1 and bundles.supports(*kinds, dim, layer.keys.block_size):
            tuning = bundles.tuning_of(n_queries, *kinds)
            n_splits = tuning.n_splits(n_bundles, n_queries, n_kv_heads)
            shares = Shares.empty(n_rows, n_heads, n_splits, dim, self._device, max(min_blocks, 2))
            bundles.attend_bundles(*given, shares, scale=op.scale, window=op.window)
        else:
            n_splits = attention_kernel.tuning_of(*kinds).n_splits(n_bundles, n_queries, n_kv_heads)
            shares = Shares.empty(n_rows, n_heads, n_splits, dim, self._device, min_blocks)
            attention_kernel.attend(*given, shares, scale=op.scale, window=op.window)
        size, rotates = layer.keys.block_size, self._rotates_v
        return combine(
            shares, tables, size, out,
            rotate=rotates, rotation=self._rotation, window=op.window, sinks=self._sinks,
        )  # fmt: skip

    def _mixed(self, q: torch.Tensor, layer: PagedLayer, place: Place) -> torch.Tensor:
        """Sequences with many rows, all at once but for long contexts; sequences with few rows as in decode."""
        out = torch.empty_like(q)
        if len(place.members):
            some = q[place.members]
            rows = Rows.empty(PLAIN, len(some), some[0].numel(), self._device)
            out[place.members] = self._decode(some, layer, place, rows).values.view(some.shape)
        if self._takes_pieces(q.shape[2]):
            rotation = (self._rotation or q.shape[2]) if self._rotates_v else 1
            if is_recording():
                library_attention.rehearse(
                    self._keys, self._values, layer.rows, q.shape[1], q.shape[2], rotation
                )
            if any(map(library_attention.n_taken, place.chunks)):
                self._long(q, layer, place, out, rotation)
                return out
        self._prefill(q, layer, place, place.spans, out)
        return out

    def _takes_pieces(self, dim: int) -> bool:
        """Whether long contexts of this layer can be left to the library."""
        is_plain = self._stage.op.window is None and self._sinks is None
        return is_plain and library_attention.supports(self._device, self._keys, self._values, dim)

    def _prefill(
        self,
        q: torch.Tensor,
        layer: PagedLayer,
        place: Place,
        spans: torch.Tensor,
        out: torch.Tensor,
        n_skipped: int = 0,
    ) -> torch.Tensor:
        op = self._stage.op
        return prefill(
            q, self._keys, self._values, layer.rows, place.numbers, spans, out,
            span_rows=place.span_rows, scale=op.scale, window=op.window,
            rotate=self._rotates_v, rotation=self._rotation, sinks=self._sinks, n_skipped=n_skipped,
        )  # fmt: skip

    def _long(
        self, q: torch.Tensor, layer: PagedLayer, place: Place, out: torch.Tensor, rotation: int
    ) -> None:
        """Sequences one by one, the beginnings of long contexts by the library."""
        first = 0
        for chunk in place.chunks:
            spans, n_taken = place.spans[first : first + chunk.n_spans], library_attention.n_taken(chunk)
            first += chunk.n_spans
            with_own = library_attention.takes_own(chunk)
            if with_own:
                sums = torch.empty(q.shape[:2], device=self._device)
            else:
                sums = self._prefill(q, layer, place, spans, out, n_taken)
            if n_taken:
                rows = slice(chunk.first_row, chunk.first_row + chunk.n_rows)
                library_attention.attend_pieces(
                    q[rows], self._keys, self._values, layer.rows, place.numbers[chunk.table + 1 :], n_taken,
                    out[rows], sums[rows], scale=self._stage.op.scale, rotation=rotation, with_own=with_own,
                )  # fmt: skip


def _by_heads(x: torch.Tensor) -> torch.Tensor:
    """x (rows, heads, dim) with each row contiguous."""
    return x if has_whole_rows(x) else x.contiguous()
