"""Stages as functions of a run's values: which kernel takes what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from motley.backends.cuda.attending import Attending
from motley.backends.cuda.kernels import experts as experts_kernel
from motley.backends.cuda.kernels import grouped_experts as grouped_kernel
from motley.backends.cuda.kernels import matmul as matmul_kernel
from motley.backends.cuda.kernels import matvec as matvec_kernel
from motley.backends.cuda.kernels import route as route_kernel
from motley.backends.cuda.kernels import router as router_kernel
from motley.backends.cuda.kernels.causal_conv import causal_conv
from motley.backends.cuda.kernels.delta_net import Gates, delta_net
from motley.backends.cuda.kernels.gate import gated
from motley.backends.cuda.kernels.gated_norm import gated_norm
from motley.backends.cuda.kernels.norm import rms_norm, scale_of
from motley.backends.cuda.kernels.rope_and_store import HeadNorms, RopeTable
from motley.backends.cuda.kernels.rows import HALVES, INT8, PLAIN, Rows, convert
from motley.backends.cuda.kernels.unpack import unpack_rows
from motley.backends.cuda.planes import BLOCK
from motley.backends.cuda.products import (
    joint_halves,
    library_product,
    plain_values,
    unpacked,
    unpacked_product,
)
from motley.backends.cuda.support import MAX_KERNEL_ROWS, MIN_COPY_ROWS, is_lookup
from motley.backends.cuda.values import Values
from motley.backends.cuda.weights import DeviceWeight, Matrices
from motley.formats import PackedTensor
from motley.graph import Graph, Tensor
from motley.graph.ops import (
    Activation,
    CausalConv,
    DeltaNet,
    ExpertFfn,
    GetRows,
    LocalIds,
    Route,
    RouteWeights,
)
from motley.graph.ops.rope import HALVES as ROPE_HALVES
from motley.plan import (
    AttentionBlock,
    DeltaRule,
    Experts,
    Gate,
    GatedNorm,
    Linear,
    Norm,
    Routing,
    Single,
    Stage,
    without_views,
)

Step = Callable[[Values], None]


class Steps:
    """Makes the steps of one plan."""

    def __init__(
        self, graph: Graph, stages: Sequence[Stage], weights: Mapping[str, DeviceWeight], matrices: Matrices
    ) -> None:
        self._outputs = graph.outputs
        self._weights = weights
        self._matrices = matrices
        self._device = matrices.device
        self._forms = self._forms_of_readers(stages)
        self._first_experts = _first_experts(stages, graph.outputs)

    def _forms_of_readers(self, stages: Sequence[Stage]) -> dict[Tensor, str]:
        """The form that products read, for each node that only products read."""
        n_rows = {out: _n_rows(stage) for stage in stages for out in stage.outputs}
        wants: dict[Tensor, set[str]] = {without_views(node): {PLAIN} for node in self._outputs}
        for stage in stages:
            for tensor in stage.inputs:
                node, form = without_views(tensor), PLAIN
                if isinstance(stage, Linear) and tensor is stage.x and tensor.shape[0] == n_rows.get(node):
                    form = self._form_of(stage)
                wants.setdefault(node, set()).add(form)
        return {node: next(iter(forms)) for node, forms in wants.items() if len(forms) == 1}

    def _form_of(self, stage: Linear) -> str:
        weight = self._matrices.joined([part.weight.name for part in stage.parts], self._weights)
        if not weight.is_packed:
            return PLAIN
        n_tokens = stage.x.shape[0]
        is_few = n_tokens <= matvec_kernel.max_vectors(weight.n_columns)
        return INT8 if is_few and n_tokens not in matmul_kernel.fast_rows(weight) else HALVES

    def prepare(self, stage: Stage) -> Step:
        match stage:
            case Norm():
                return self._norm(stage)
            case Linear() if not stage.x.shape[0]:  # a part of a prompt before its last: no logits
                return self._nothing(*stage.outputs)
            case Linear():
                return self._linear(stage)
            case Gate():
                return self._gate(stage)
            case AttentionBlock():
                form = self._forms.get(stage.outputs[0], PLAIN)
                sinks = next((self._dense(weight) for weight in stage.attention.inputs[2:]), None)
                rope = self._rope_table(stage)
                return Attending(stage, rope, form, self._device, sinks, self._head_norms(stage))
            case Routing():
                return self._routing(stage)
            case Experts():
                return self._expert_ffn(stage.node, stage.residual, stage.out, stage.shared)
            case DeltaRule():
                return self._delta_rule(stage)
            case GatedNorm():
                return self._gated_norm(stage)
            case Single() if isinstance(stage.node.op, CausalConv | DeltaNet) and not stage.node.n_values:
                return self._nothing(stage.node)
            case Single() if isinstance(stage.node.op, CausalConv):
                return self._causal_conv(stage.node)
            case Single() if isinstance(stage.node.op, DeltaNet):
                return self._delta_net(stage.node, stage.node.op)
            case Single() if isinstance(stage.node.op, GetRows):
                return self._embed(stage) if is_lookup(stage.node) else self._choose(stage)
            case Single() if isinstance(stage.node.op, Route):
                return self._route(stage.node, stage.node.op)
            case Single() if isinstance(stage.node.op, RouteWeights):
                return self._route_weights(stage.node, stage.node.op)
            case Single() if isinstance(stage.node.op, ExpertFfn):
                return self._expert_ffn(stage.node, None, stage.node)
            case Single() if isinstance(stage.node.op, LocalIds):
                return self._local_ids(stage)
            case Single():
                return self._single(stage)

    def _dense(self, node: Tensor) -> torch.Tensor:
        """A small weight (a norm's, a bias) as float32."""
        return self._matrices.small(node.name, lambda: self._packed(node).unpack().contiguous())

    def _packed(self, node: Tensor) -> PackedTensor:
        """A weight that is no matrix, or a table that is still in the file."""
        weight = self._weights[node.name]
        assert isinstance(weight, PackedTensor), f"{node.name} is a matrix, which only products read"
        return weight.to(self._device)

    def _rows_for(self, node: Tensor, fixed: int = 0) -> Rows:
        form = self._forms.get(node, PLAIN)
        return Rows.empty(form, node.shape[0], node.shape[1], self._device, fixed)

    def _embed(self, stage: Single) -> Step:
        """Rows of a packed table."""
        (table, ids), out = stage.inputs, stage.out
        weight = self._matrices.get(table.name, self._weights)

        def step(values: Values) -> None:
            rows = values.plain(ids)
            if weight.is_packed:
                values.put(out, unpack_rows(weight, rows, torch.empty(out.shape, device=self._device)))
            else:
                chosen = plain_values(weight)[rows.clamp(min=0).long()].float()
                values.put(out, torch.where((rows >= 0)[:, None], chosen, 0.0))

        return step

    def _norm(self, stage: Norm) -> Step:
        x, out, eps, ids = stage.x, stage.out, stage.eps, stage.rows
        assert stage.weight is not None
        scale = self._dense(stage.weight)

        def step(values: Values) -> None:
            chosen = None if ids is None else values.plain(ids)
            rows = self._rows_for(out, fixed=scale_of(out.shape[1]))
            source, added = _source(values, x) if ids is None else (values.plain(x).contiguous(), None)
            values.put(out, rms_norm(source, scale, eps, rows, chosen, added))

        return step

    def _linear(self, stage: Linear) -> Step:
        x, added = stage.x, stage.parts[0].residual
        matrix = self._matrices.joined([part.weight.name for part in stage.parts], self._weights)
        form, n_tokens = self._form_of(stage), x.shape[0]
        sizes = [node.shape[1] for node in stage.outputs]
        copies = self._matrices.copies_of(stage.parts[0].weight.name, self._weights)
        takes_copy = n_tokens >= MIN_COPY_ROWS and n_tokens not in matmul_kernel.fast_rows(matrix)

        def step(values: Values) -> None:
            residual = None if added is None else values.plain(added).contiguous()
            out = torch.empty(n_tokens, matrix.n_rows, device=self._device)
            if form == PLAIN:
                out = library_product(values.plain(x), plain_values(matrix), residual)
            elif form == INT8:
                matvec_kernel.matvec(matrix, values.rows(x, INT8), out, residual)
            else:
                copy = copies.get(matrix) if takes_copy else None
                if copy is None and n_tokens <= MAX_KERNEL_ROWS:
                    matmul_kernel.matmul(matrix, values.rows(x, HALVES), out, residual)
                else:
                    dense = unpacked(matrix) if copy is None else copy
                    out = unpacked_product(dense, values.rows(x, HALVES), out, residual)
            for node, part in zip(stage.outputs, torch.split(out, sizes, 1), strict=True):
                values.put(node, part)

        return step

    def _gate(self, stage: Gate) -> Step:
        gate, up, out = stage.gate, stage.up, stage.out
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

    def _route(self, node: Tensor, op: Route) -> Step:
        logits, n_used, *biases = node.inputs
        if op.n_groups_used < op.n_groups:  # by the reference
            return self._single(Single.of(node))
        bias = self._dense(biases[0]) if biases else None

        def step(values: Values) -> None:
            values.put(
                node, route_kernel.route(op, values.plain(logits).contiguous(), values.plain(n_used), bias)
            )

        return step

    def _route_weights(self, node: Tensor, op: RouteWeights) -> Step:
        logits, ids = node.inputs

        def step(values: Values) -> None:
            chosen = values.plain(ids).contiguous()
            values.put(node, route_kernel.route_weights(op, values.plain(logits).contiguous(), chosen))

        return step

    def _rope_table(self, stage: AttentionBlock) -> RopeTable:
        rope, divisors = stage.rope, stage.q.inputs[2:]

        def frequencies() -> torch.Tensor:
            return rope.frequencies(*(self._dense(weight).cpu() for weight in divisors)).to(self._device)

        key = (rope, *(weight.name for weight in divisors))
        table = self._matrices.small(key, frequencies)
        return RopeTable(table, rope.n_dims, rope.style == ROPE_HALVES, rope.magnitude)

    def _head_norms(self, stage: AttentionBlock) -> HeadNorms | None:
        if stage.norms is None:
            return None
        queries, keys = stage.norms
        assert queries.weight is not None
        assert keys.weight is not None
        return HeadNorms(self._dense(queries.weight), self._dense(keys.weight), queries.eps)

    def _routing(self, stage: Routing) -> Step:
        """Norm and router in one launch for few tokens; then the choice with its weights in another one."""
        x, norm = stage.x, stage.norm
        route, weigh, (n_used, *choice_bias) = stage.route.op, stage.weigh.op, stage.route.inputs[1:]
        assert isinstance(route, Route)
        assert isinstance(weigh, RouteWeights)
        router = plain_values(self._matrices.get(stage.weight.name, self._weights)).contiguous()
        scale = None if norm is None or norm.weight is None else self._dense(norm.weight)
        bias = None if stage.bias is None else self._dense(stage.bias)
        by_choice = self._dense(choice_bias[0]) if choice_bias else None
        gate, gate_row = stage.shared_gate, None
        if gate is not None:
            gate_row = plain_values(self._matrices.get(gate.weight.name, self._weights)).contiguous()

        def logits_of(values: Values) -> torch.Tensor:
            if x.shape[0] < grouped_kernel.MIN_TOKENS:
                eps = 0.0 if norm is None else norm.eps
                plain, added = (
                    (values.plain(x).contiguous(), None) if norm is None else _source(values, norm.x)
                )
                logits, normed, rows, gates = router_kernel.norm_and_logits(
                    plain, router, scale, eps, bias, gate_row, added
                )
                if gate is not None:
                    values.put(gate.out, gates)
                if norm is not None:
                    values.put(x, normed)
                values.put(without_views(x), rows)
                return logits
            if norm is not None:
                assert scale is not None
                form = Rows.empty(PLAIN, x.shape[0], x.shape[1], self._device)
                plain, added = _source(values, norm.x)
                values.put(x, rms_norm(plain, scale, norm.eps, form, added=added))
            if gate is not None and gate_row is not None:
                values.put(gate.out, library_product(values.plain(x), gate_row, None))
            logits = library_product(values.plain(x), router, None)
            return logits if bias is None else logits + bias

        def step(values: Values) -> None:
            logits, counts = logits_of(values), values.plain(n_used)
            ids, weights = route_kernel.route_and_weigh(route, weigh, logits, counts, by_choice)
            values.put(stage.route, ids)
            values.put(stage.weigh, weights)

        return step

    def _expert_ffn(
        self, node: Tensor, added: Tensor | None, out: Tensor, shared: tuple[Tensor, Tensor] | None = None
    ) -> Step:
        assert isinstance(node.op, ExpertFfn)
        (x, ids, weights), matrices, function = node.inputs[:3], node.inputs[3:6], node.op.function
        n_experts, n_tokens, k = matrices[0].shape[0], *ids.shape
        gate, up, down = (self._matrices.get(t.name, self._weights) for t in matrices)
        first = self._first_experts.get(ids, 0)
        is_empty = not n_tokens or not all(t.n_values for t in matrices)  # no expert, or no column, is here
        gate_bias, up_bias, down_bias = self._expert_biases(node)
        biases = None if gate_bias is None or up_bias is None else (gate_bias, up_bias)
        is_grouped = n_tokens >= grouped_kernel.MIN_TOKENS and all(m.is_packed for m in (gate, up, down))
        gate_form, up_form, down_form = map(experts_kernel.operand_form, (gate, up, down))

        def residual(values: Values) -> torch.Tensor | None:
            return None if added is None else values.plain(added).contiguous()

        def of_shared(values: Values) -> tuple[torch.Tensor, torch.Tensor] | None:
            if shared is None:
                return None
            return values.plain(shared[0]).contiguous(), values.plain(shared[1]).contiguous()

        def one_by_one(values: Values) -> None:
            chosen, shares = values.plain(ids).contiguous(), values.plain(weights).contiguous()
            gate_x, up_x = values.rows(x, gate_form), values.rows(x, up_form)
            hidden = experts_kernel.expert_hidden(
                gate, up, n_experts, gate_x, up_x, chosen, biases, function, down_form, first
            )
            total = experts_kernel.expert_sum(
                down, n_experts, hidden, chosen, shares, residual(values), down_bias, of_shared(values), first
            )
            values.put(out, total)

        def grouped(values: Values) -> None:
            chosen, shares = values.plain(ids).contiguous(), values.plain(weights).contiguous()
            found = grouped_kernel.groups(chosen, n_experts, first_expert=first)
            halves = values.rows(x, HALVES)
            hidden = grouped_kernel.grouped_hidden(gate, up, n_experts, halves, k, found, biases, function)
            rows = self._converted(hidden, HALVES)
            parts = grouped_kernel.grouped_down(down, n_experts, rows, shares, found, down_bias)
            total = grouped_kernel.slot_sums(
                parts, chosen, n_experts, residual(values), of_shared(values), first
            )
            values.put(out, total)

        def empty(values: Values) -> None:
            nothing, common = residual(values), of_shared(values)
            total = torch.zeros(node.shape, device=self._device) if nothing is None else nothing
            values.put(out, total if common is None else total + common[0] * common[1].sigmoid())

        return empty if is_empty else grouped if is_grouped else one_by_one

    def _expert_biases(self, node: Tensor) -> list[torch.Tensor | None]:
        """The biases of gate, up and down, float32 (experts, columns); None where there is none on this device."""
        found = [
            plain_values(self._matrices.get(t.name, self._weights)).float().contiguous()
            if t.n_values
            else None
            for t in node.inputs[6:]
        ]
        return found or [None] * 3

    def _converted(self, values: torch.Tensor, form: str) -> Rows:
        if form == PLAIN:
            return Rows(PLAIN, values, values, values)
        return convert(values, Rows.empty(form, values.shape[0], values.shape[1], self._device))

    def _nothing(self, *nodes: Tensor) -> Step:
        """The attention of a device without heads, or of no rows."""

        def step(values: Values) -> None:
            for node in nodes:
                values.put(node, torch.empty(node.shape, device=self._device))

        return step

    def _causal_conv(self, node: Tensor) -> Step:
        x, weight, state = node.inputs
        taps = plain_values(self._matrices.get(weight.name, self._weights)).contiguous()

        def step(values: Values) -> None:
            planes, spans = values.plain(state)
            values.put(
                node, causal_conv(values.plain(x).contiguous(), taps, planes.states, planes.rings, spans)
            )

        return step

    def _delta_net(self, node: Tensor, op: DeltaNet) -> Step:
        """The step of a delta net whose decay and beta are inputs."""
        mixed, decay, beta, state = node.inputs

        def step(values: Values) -> None:
            planes, spans = values.plain(state)
            given = values.plain(decay).contiguous(), values.plain(beta).contiguous()
            out = delta_net(
                values.plain(mixed).contiguous(), given, planes.states, planes.rings, spans,
                eps=op.eps, is_cyclic=op.is_cyclic,
            )  # fmt: skip
            values.put(node, out)

        return step

    def _delta_rule(self, stage: DeltaRule) -> Step:
        node, (mixed, *_, state) = stage.node, stage.node.inputs
        assert isinstance(node.op, DeltaNet)
        op, offset, factor = node.op, self._dense(stage.offset), self._dense(stage.factor)

        def step(values: Values) -> None:
            # Slices of one product, (rows, key heads, n): read in place.
            a, b = (values.plain(without_views(t)) for t in (stage.a, stage.b))
            if a.stride() != b.stride() or a.stride(-1) != 1 or a.dim() > 3:
                a, b = values.plain(stage.a).contiguous(), values.plain(stage.b).contiguous()
            planes, spans = values.plain(state)
            out = delta_net(
                values.plain(mixed).contiguous(), Gates(a, b, offset, factor), planes.states, planes.rings, spans,
                eps=op.eps, is_cyclic=op.is_cyclic,
            )  # fmt: skip
            values.put(node, out)

        return step

    def _gated_norm(self, stage: GatedNorm) -> Step:
        norm, gate, out = stage.norm, stage.gate, stage.out
        assert norm.weight is not None
        weight, (n_rows, n_heads, dim) = self._dense(norm.weight), out.shape
        form = INT8 if self._forms.get(out) == INT8 else PLAIN

        def step(values: Values) -> None:
            factors = values.plain(gate)
            factors = factors if factors.stride()[1:] == (dim, 1) else factors.contiguous()
            rows = Rows.empty(form, n_rows, n_heads * dim, self._device)
            values.put(out, gated_norm(values.plain(norm.x).contiguous(), factors, weight, norm.eps, rows))

        return step

    def _choose(self, stage: Single) -> Step:
        """Rows of an activation; zeros for an id of -1."""
        (table, ids), out = stage.inputs, stage.out

        def step(values: Values) -> None:
            rows = values.plain(ids)
            chosen = values.plain(table)[rows.clamp(min=0).long()]
            values.put(out, torch.where((rows >= 0).view(-1, *[1] * (chosen.dim() - 1)), chosen, 0.0))

        return step

    def _local_ids(self, stage: Single) -> Step:
        node, (ids,) = stage.node, stage.inputs
        assert isinstance(node.op, LocalIds)
        if node in self._first_experts:  # the experts' kernels take ids as they are
            return lambda values: values.put(node, values.plain(ids))
        ranges = list(node.op.word.global_ranges(node.op.device))
        if len(ranges) > 1 or not node.n_values:
            return self._single(stage)
        start, stop = ranges[0] if ranges else (0, 0)

        def step(values: Values) -> None:
            values.put(node, route_kernel.local_ids(values.plain(ids).contiguous(), start, stop))

        return step

    def _single(self, stage: Single) -> Step:
        """Anything else: by the op's reference, on the device."""
        node = stage.node
        fixed = {t: self._packed(t) for t in stage.inputs if t.name in self._weights}

        def step(values: Values) -> None:
            values.put(
                node, node.op.reference([fixed[t] if t in fixed else values.plain(t) for t in stage.inputs])
            )

        return step


def _n_rows(stage: Stage) -> int:
    """Rows that a stage's kernel writes: of an attention, one for each token, whatever its node's shape."""
    node = stage.q.node if isinstance(stage, AttentionBlock) else stage.outputs[0]
    return node.shape[0] if node.shape else 0


def _source(values: Values, x: Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The tensor that a norm reads as x, the tensor that it adds, and the memory of the sum, where x will be."""
    addends = values.addends(x)
    if addends is None:
        return values.plain(x).contiguous(), None
    first, second = addends
    total = torch.empty_like(first)
    values.put(without_views(x), total)
    return first, (second, total)


def _first_experts(stages: Sequence[Stage], outputs: Sequence[Tensor]) -> dict[Tensor, int]:
    """The id of the first expert, for each LocalIds of neighbouring experts that only experts read."""
    found: dict[Tensor, int] = {}
    for stage in stages:
        if isinstance(stage, Single) and isinstance(stage.node.op, LocalIds):
            ranges = list(stage.node.op.word.global_ranges(stage.node.op.device))
            if len(ranges) == 1:
                found[stage.node] = ranges[0][0]
    for stage in stages:
        is_expert = isinstance(stage, Experts) or (
            isinstance(stage, Single) and isinstance(stage.node.op, ExpertFfn)
        )
        for tensor in stage.inputs:
            if not is_expert:
                found.pop(without_views(tensor), None)
    for tensor in outputs:
        found.pop(without_views(tensor), None)
    return found
