"""Attention's stage: into the cache, over it, and out again as rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from motley.backends.cuda.kernels import attention as attention_kernel
from motley.backends.cuda.kernels.attention import Shares
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.enter import RopeTable, enter
from motley.backends.cuda.kernels.gather import gather
from motley.backends.cuda.kernels.rows import INT8, PLAIN, Rows
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.backends.cuda.lowering import Attend
from motley.backends.cuda.staging import Place
from motley.backends.cuda.values import Values
from motley.backends.paged import PagedLayer, Store, Table
from motley.errors import PlanError
from motley.graph.ops import Hadamard
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
        self._turn = Hadamard(stage.turn).reference([]).to(device) if stage.rotates_v else None

    def __call__(self, values: Values) -> None:
        stage = self._stage
        (q, k, v, positions, cache, *_), (out,) = stage.inputs, stage.outputs
        if not out.n_values:  # this device has no heads
            values.put(out, torch.empty(out.shape, device=self._device))
            return
        layer, place = values.plain(cache)
        keys, stored = _planes(layer.keys), _planes(layer.values)
        self._require(keys, stored, layer)
        turned = torch.empty(q.shape, device=self._device)
        enter(
            values.plain(q), values.plain(k), values.plain(v), values.plain(positions), place.slots, self._rope,
            keys, stored, layer.rows, turned, rotate_k=stage.rotates_k, rotate_v=stage.rotates_v, turn=stage.turn,
        )  # fmt: skip
        if place.is_decode:
            rows = Rows.empty(self._form, out.shape[0], out.shape[1], self._device)
            values.put(out, self._decode(turned, layer, place, rows))
        else:
            values.put(out, self._mixed(turned, layer, place).reshape(out.shape))

    def _require(self, keys: CachePlanes, values: CachePlanes, layer: PagedLayer) -> None:
        n_heads, dim = self._stage.inputs[0].shape[1:]
        group = n_heads // max(1, self._stage.inputs[1].shape[1])
        reason = attention_kernel.supports(keys.kind, values.kind, dim, group, layer.keys.block_size)
        if reason is not None:
            raise PlanError(f"cuda: {reason}", hint="choose other cache types, or another backend")

    def _decode(self, q: torch.Tensor, layer: PagedLayer, place: Place, out: Rows) -> Rows:
        n_rows, n_heads, dim = q.shape
        op, n_kv_heads = self._stage.attention, layer.rows.stop - layer.rows.start
        keys, values = _planes(layer.keys), _planes(layer.values)
        n_splits = attention_kernel.TUNINGS[values.kind].n_splits(n_rows, n_kv_heads)
        shares = Shares.empty(n_rows, n_heads, n_splits, dim, self._device)
        attention_kernel.attend(
            q, keys, values, layer.rows, place.tables, shares, scale=op.scale, window=op.window
        )
        size, turns = layer.keys.block_size, self._stage.rotates_v
        return combine(shares, place.tables, size, out, rotate=turns, turn=self._stage.turn, window=op.window)

    def _mixed(self, q: torch.Tensor, layer: PagedLayer, place: Place) -> torch.Tensor:
        """Sequences with several rows by the library's attention on unpacked K and V, the others as in decode."""
        out = torch.empty_like(q)
        if len(place.single_rows):
            some = q[place.single_rows]
            rows = Rows.empty(PLAIN, len(some), some[0].numel(), self._device)
            out[place.single_rows] = self._decode(some, layer, place, rows).values.view(some.shape)
        for chunk, blocks in zip(place.chunks, place.chunk_blocks, strict=True):
            start, stop = chunk.first_row, chunk.first_row + chunk.n_rows
            out[start:stop] = self._attend_chunk(q[start:stop], layer, chunk, blocks)
        return out

    def _attend_chunk(
        self, q: torch.Tensor, layer: PagedLayer, chunk: Table, blocks: torch.Tensor
    ) -> torch.Tensor:
        n_context, op = chunk.n_context, self._stage.attention
        keys, values = (
            gather(_planes(s), layer.rows, blocks, n_context, q.shape[2]) for s in (layer.keys, layer.values)
        )
        is_whole = len(q) == n_context and chunk.first == 0 and op.window is None
        mask = None
        if not is_whole:
            keys_at = torch.arange(n_context, device=self._device, dtype=torch.int32)
            distance = keys_at[n_context - len(q) :, None] - keys_at
            mask = (distance >= 0) & (distance < (op.window or 2**30))
        out = F.scaled_dot_product_attention(
            q.half().transpose(0, 1)[None], keys[None], values[None], mask,
            is_causal=is_whole, scale=op.scale, enable_gqa=q.shape[1] != keys.shape[0],
        )  # fmt: skip
        turned = out[0].transpose(0, 1).float()
        if self._turn is None:
            return turned
        return (torch.unflatten(turned, -1, (-1, len(self._turn))) @ self._turn).flatten(-2)


def _planes(store: Store) -> CachePlanes:
    return CachePlanes.of(store.kind.name, store.planes)
