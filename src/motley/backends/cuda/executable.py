"""Runs the stages of one device's graph. Decode batches are captured once as a CUDA graph, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from motley.backends.base import Executable
from motley.backends.cuda.capture import Captured
from motley.backends.cuda.kernels import attention as attention_kernel
from motley.backends.cuda.kernels import matmul as matmul_kernel
from motley.backends.cuda.kernels import matvec as matvec_kernel
from motley.backends.cuda.kernels.attention import Shares
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.enter import RopeTable, enter
from motley.backends.cuda.kernels.gate import gated
from motley.backends.cuda.kernels.gather import gather
from motley.backends.cuda.kernels.norm import rms_norm
from motley.backends.cuda.kernels.rows import HALVES, INT8, PLAIN, Rows
from motley.backends.cuda.kernels.unpack import unpack_rows
from motley.backends.cuda.lowering import Attend, Embed, Gate, Linear, Lowering, Norm, Stage
from motley.backends.cuda.paged import Place, cache_planes
from motley.backends.cuda.planes import BLOCK
from motley.backends.cuda.products import joint_halves, library_product, plain_values, unpacked_product
from motley.backends.cuda.values import Values
from motley.backends.cuda.weights import Matrices
from motley.backends.paged import PagedLayer, Table
from motley.errors import PlanError
from motley.formats import PackedTensor
from motley.graph import CACHE, I32, Tensor
from motley.graph.ops import Activation, Input
from motley.graph.ops.rope import HALVES as ROPE_HALVES
from motley.plan import DevicePlan, Launch


class CudaExecutable(Executable):
    def __init__(
        self,
        plan: DevicePlan,
        weights: Mapping[str, PackedTensor],
        matrices: Matrices,
        *,
        captures: bool = True,
    ) -> None:
        self._plan = plan
        self._weights = weights
        self._matrices = matrices
        self._device = matrices.device
        graph = plan.graph
        lowering = Lowering(graph)
        self._fixed: dict[Tensor, Any] = {
            node: node.op.reference([]).to(self._device) for node in graph.nodes if node.op.is_constant
        }
        self._launches: dict[Tensor, Launch] = {
            step.node: step.kernel.prepare(step.node)
            for step in plan.steps
            if step.kernel.name == "collective"
        }
        self._forms = self._wanted_forms(lowering.stages)
        self._steps = [
            (self._prepare(stage), dead) for stage, dead in _with_dead(lowering.stages, graph.outputs)
        ]
        self._captures = captures and not self._launches and self._device.type == "cuda"
        self._captured: Captured | None = None
        self._n_decodes = 0
        self._places: dict[int, Place] = {}  # by id of the batch's group, during a run

    @property
    def n_activation_bytes(self) -> int:
        return self._plan.layout.n_bytes

    def run(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(), _current(self._device):
            given, places = self._to_device(inputs)
            if self._captured is None and self._captures and all(p.is_decode for p in places.values()):
                self._n_decodes += 1
                if self._n_decodes > 1:  # the first run has compiled the kernels
                    self._captured = Captured(self._execute, given, places)
            if self._captured is not None and self._captured.fits(places):
                return self._captured.replay(given, places)
            return self._execute(given, places)

    def _to_device(self, inputs: Mapping[str, Any]) -> tuple[dict[Tensor, Any], dict[int, Place]]:
        given: dict[Tensor, Any] = {}
        places: dict[int, Place] = {}
        order: dict[int, int] = {}  # groups are numbered as they come, so that runs can be matched
        for node in self._plan.graph.inputs:
            value = inputs[node.name]
            if node.dtype != CACHE:
                given[node] = value.to(self._device, torch.int32 if node.dtype == I32 else torch.float32)
                continue
            key = order.setdefault(id(value.batch), len(order))
            given[node] = value, key
            if key not in places:
                n_blocks = next(iter(value.keys.planes.values())).shape[0]
                places[key] = Place.of(value.batch, n_blocks, self._device)
        return given, places

    def _execute(self, given: Mapping[Tensor, Any], places: dict[int, Place]) -> tuple[torch.Tensor, ...]:
        self._places = places
        values = Values(self._fixed | dict(given))
        for step, dead in self._steps:
            step(values)
            for node in dead:
                values.forget(node)
        return tuple(values.plain(node) for node in self._plan.graph.outputs)

    def _wanted_forms(self, stages: Sequence[Stage]) -> dict[Tensor, str]:
        """For each node that only products read: the form they want it in."""
        wants: dict[Tensor, set[str]] = {node: {PLAIN} for node in self._plan.graph.outputs}
        for stage in stages:
            for i, node in enumerate(stage.inputs):
                form = self._form_of(stage) if isinstance(stage, Linear) and i == 0 else PLAIN
                wants.setdefault(node, set()).add(form)
        return {node: next(iter(forms)) for node, forms in wants.items() if len(forms) == 1}

    def _form_of(self, stage: Linear) -> str:
        weight = self._matrices.get(stage.inputs[1].name, self._weights)
        if matmul_kernel.supports(weight) is not None:
            return PLAIN
        return INT8 if stage.inputs[0].shape[0] == 1 else HALVES

    def _prepare(self, stage: Stage) -> Callable[[Values], None]:
        match stage:
            case Embed():
                return self._embed(stage)
            case Norm():
                return self._norm(stage)
            case Linear():
                return self._linear(stage)
            case Gate():
                return self._gate(stage)
            case Attend():
                return self._attend(stage)
        return self._single(stage)

    def _dense(self, node: Tensor) -> torch.Tensor:
        """A small weight (a norm's, a bias) as float32."""
        return self._weights[node.name].to(self._device).unpack().contiguous()

    def _rows_for(self, node: Tensor) -> Rows:
        return Rows.empty(self._forms.get(node, PLAIN), node.shape[0], node.shape[1], self._device)

    def _embed(self, stage: Embed) -> Callable[[Values], None]:
        (table, ids), (out,) = stage.inputs, stage.outputs
        weight = self._matrices.get(table.name, self._weights)

        def step(values: Values) -> None:
            rows = values.plain(ids)
            if matmul_kernel.supports(weight) is None:
                values.put(out, unpack_rows(weight, rows, torch.empty(out.shape, device=self._device)))
            else:
                chosen = plain_values(weight)[rows.clamp(min=0).long()].float()
                values.put(out, torch.where((rows >= 0)[:, None], chosen, 0.0))

        return step

    def _norm(self, stage: Norm) -> Callable[[Values], None]:
        (x, weight, *ids), (out,) = stage.inputs, stage.outputs
        scale, eps = self._dense(weight), stage.eps
        if out.shape[1] % 32:
            raise PlanError(f"cuda: {out.name!r} has rows of {out.shape[1]} values, not whole blocks of 32")

        def step(values: Values) -> None:
            chosen = values.plain(ids[0]) if ids else None
            values.put(out, rms_norm(values.plain(x).contiguous(), scale, eps, self._rows_for(out), chosen))

        return step

    def _linear(self, stage: Linear) -> Callable[[Values], None]:
        x, weights = stage.inputs[0], stage.inputs[1 : 1 + stage.n_weights]
        residuals = stage.inputs[1 + stage.n_weights :]
        matrix = self._matrices.joined([w.name for w in weights], self._weights)
        form, n_tokens = self._form_of(stage), x.shape[0]
        sizes = [node.shape[1] for node in stage.outputs]

        def step(values: Values) -> None:
            residual = values.plain(residuals[0]).contiguous() if residuals else None
            out = torch.empty(n_tokens, matrix.n_rows, device=self._device)
            if form == PLAIN:
                out = library_product(values.plain(x), plain_values(matrix), residual)
            elif form == INT8:
                matvec_kernel.matvec(matrix, values.rows(x, INT8), out, residual)
            elif n_tokens <= matmul_kernel.MAX_TOKENS:
                matmul_kernel.matmul(matrix, values.rows(x, HALVES), out, residual)
            else:
                out = unpacked_product(matrix, values.rows(x, HALVES), residual)
            for node, part in zip(stage.outputs, torch.split(out, sizes, 1), strict=True):
                values.put(node, part)

        return step

    def _gate(self, stage: Gate) -> Callable[[Values], None]:
        (gate, up), (out,) = stage.inputs, stage.outputs
        is_whole = out.n_values > 0 and out.shape[1] % BLOCK == 0

        def step(values: Values) -> None:
            a, b = values.plain(gate), values.plain(up)
            if not is_whole:  # a device's part may be empty, or cut through a block of 32
                values.put(out, Activation(stage.function).reference([a]) * b)
                return
            both = joint_halves(a, b)
            both = torch.cat([a, b], 1) if both is None else both
            values.put(out, gated(both, stage.function, self._rows_for(out)))

        return step

    def _attend(self, stage: Attend) -> Callable[[Values], None]:
        (q, k, v, positions, cache, *divisors), (out,) = stage.inputs, stage.outputs
        rope = stage.rope
        n_heads, dim = q.shape[1:]
        group = n_heads // max(1, k.shape[1])
        factors = [self._dense(d).cpu() for d in divisors]
        table = RopeTable(
            rope.frequencies(*factors).to(self._device),
            rope.n_dims,
            rope.style == ROPE_HALVES,
            rope.magnitude,
        )
        form = self._forms.get(out, PLAIN)

        def step(values: Values) -> None:
            if not out.n_values:  # this device has no heads
                values.put(out, torch.empty(out.shape, device=self._device))
                return
            layer, number = values.plain(cache)
            place, keys, stored = self._places[number], cache_planes(layer.keys), cache_planes(layer.values)
            reason = attention_kernel.supports(keys.kind, stored.kind, dim, group, layer.keys.block_size)
            if reason is not None:
                raise PlanError(f"cuda: {reason}", hint="choose other cache types, or another backend")
            turned = torch.empty(q.shape, device=self._device)
            enter(
                values.plain(q), values.plain(k), values.plain(v), values.plain(positions), place.slots, table,
                keys, stored, layer.rows, turned, rotate_k=stage.rotates_k, rotate_v=stage.rotates_v,
            )  # fmt: skip
            if place.is_decode:
                one_form = INT8 if form == INT8 else PLAIN
                rows = Rows.empty(one_form, out.shape[0], out.shape[1], self._device)
                values.put(out, self._decode(turned, layer, place, rows, stage))
            else:
                values.put(out, self._mixed(turned, layer, place, stage).reshape(out.shape))

        return step

    def _decode(self, q: torch.Tensor, layer: PagedLayer, place: Place, out: Rows, stage: Attend) -> Rows:
        n_rows, n_heads, dim = q.shape
        op, n_kv_heads = stage.attention, layer.rows.stop - layer.rows.start
        keys, values = cache_planes(layer.keys), cache_planes(layer.values)
        n_splits = attention_kernel.TUNINGS[values.kind].n_splits(n_rows, n_kv_heads)
        shares = Shares.empty(n_rows, n_heads, n_splits, dim, self._device)
        attention_kernel.attend(
            q, keys, values, layer.rows, place.tables, shares, scale=op.scale, window=op.window
        )
        size = layer.keys.block_size
        return combine(shares, place.tables, size, out, rotate=stage.rotates_v, window=op.window)

    def _mixed(self, q: torch.Tensor, layer: PagedLayer, place: Place, stage: Attend) -> torch.Tensor:
        """Sequences with several rows by the library's attention on unpacked K and V, the others as in decode."""
        out = torch.empty_like(q)
        if len(place.single_rows):
            some = q[place.single_rows]
            rows = Rows.empty(PLAIN, len(some), some[0].numel(), self._device)
            out[place.single_rows] = self._decode(some, layer, place, rows, stage).values.view(some.shape)
        for chunk, blocks in zip(place.chunks, place.chunk_blocks, strict=True):
            start, stop = chunk.first_row, chunk.first_row + chunk.n_rows
            out[start:stop] = self._attend_chunk(q[start:stop], layer, chunk, blocks, stage)
        return out

    def _attend_chunk(
        self, q: torch.Tensor, layer: PagedLayer, chunk: Table, blocks: torch.Tensor, stage: Attend
    ) -> torch.Tensor:
        n_context = chunk.n_context
        keys, values = (
            gather(cache_planes(s), layer.rows, blocks, n_context) for s in (layer.keys, layer.values)
        )
        is_whole = len(q) == n_context and chunk.first == 0 and stage.attention.window is None
        mask = None
        if not is_whole:
            rows = torch.arange(n_context - len(q), n_context, device=self._device)[:, None]
            distance = rows - torch.arange(n_context, device=self._device)
            mask = (distance >= 0) & (distance < (stage.attention.window or 2**30))
        out = F.scaled_dot_product_attention(
            q.half().transpose(0, 1)[None], keys[None], values[None], mask,
            is_causal=is_whole, scale=stage.attention.scale, enable_gqa=q.shape[1] != keys.shape[0],
        )  # fmt: skip
        turned = out[0].transpose(0, 1).float()
        return turned @ self._turn(q.shape[2]) if stage.rotates_v else turned

    def _turn(self, dim: int) -> torch.Tensor:
        turn: torch.Tensor = next(m for m in self._fixed.values() if m.shape == (dim, dim))
        return turn

    def _single(self, stage: Stage) -> Callable[[Values], None]:
        (node,) = stage.outputs
        launch = self._launches.get(node)
        fixed = {t: self._weights[t.name].to(self._device) for t in stage.inputs if t.name in self._weights}

        def step(values: Values) -> None:
            inputs = [fixed[t] if t in fixed else values.plain(t) for t in stage.inputs]
            if launch is None:
                values.put(node, node.op.reference(inputs))
            else:
                dtype = torch.int32 if node.dtype == I32 else torch.float32
                values.put(node, launch(inputs, torch.empty(node.shape, dtype=dtype, device=self._device)))

        return step


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _with_dead(stages: Sequence[Stage], outputs: Sequence[Tensor]) -> list[tuple[Stage, tuple[Tensor, ...]]]:
    """Each stage with the nodes that nobody reads after it."""
    last: dict[Tensor, int] = {}
    for number, stage in enumerate(stages):
        last |= dict.fromkeys((*stage.inputs, *stage.outputs), number)
    keep = set(outputs)
    dead: list[list[Tensor]] = [[] for _ in stages]
    for node, number in last.items():
        if node not in keep and not isinstance(node.op, Input) and not node.op.is_constant:
            dead[number].append(node)
    return [(stage, tuple(nodes)) for stage, nodes in zip(stages, dead, strict=True)]
