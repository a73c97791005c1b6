"""Stages as functions of a run's values: which kernel takes what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from motley.backends.cuda.attending import Attending
from motley.backends.cuda.kernels import matmul as matmul_kernel
from motley.backends.cuda.kernels import matvec as matvec_kernel
from motley.backends.cuda.kernels.gate import gated
from motley.backends.cuda.kernels.norm import rms_norm
from motley.backends.cuda.kernels.rows import HALVES, INT8, PLAIN, Rows
from motley.backends.cuda.kernels.unpack import unpack_rows
from motley.backends.cuda.lowering import Attend, Choose, Embed, Gate, Linear, Norm, Stage
from motley.backends.cuda.planes import BLOCK
from motley.backends.cuda.products import joint_halves, library_product, plain_values, unpacked_product
from motley.backends.cuda.values import Values
from motley.backends.cuda.weights import Matrices
from motley.formats import PackedTensor
from motley.graph import Graph, Tensor
from motley.graph.ops import Activation

Step = Callable[[Values], None]


class Steps:
    """Makes the steps of one plan."""

    def __init__(
        self, graph: Graph, stages: Sequence[Stage], weights: Mapping[str, PackedTensor], matrices: Matrices
    ) -> None:
        self._outputs = graph.outputs
        self._weights = weights
        self._matrices = matrices
        self._device = matrices.device
        self._forms = self._wanted_forms(stages)

    def _wanted_forms(self, stages: Sequence[Stage]) -> dict[Tensor, str]:
        """For each node that only products read: the form they want it in."""
        wants: dict[Tensor, set[str]] = {node: {PLAIN} for node in self._outputs}
        for stage in stages:
            for i, node in enumerate(stage.inputs):
                form = self._form_of(stage) if isinstance(stage, Linear) and i == 0 else PLAIN
                wants.setdefault(node, set()).add(form)
        return {node: next(iter(forms)) for node, forms in wants.items() if len(forms) == 1}

    def _form_of(self, stage: Linear) -> str:
        weight = self._matrices.get(stage.inputs[1].name, self._weights)
        if not weight.is_packed:
            return PLAIN
        return INT8 if stage.inputs[0].shape[0] == 1 else HALVES

    def prepare(self, stage: Stage) -> Step:
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
                divisors = [self._dense(weight).cpu() for weight in stage.inputs[5:]]
                return Attending(stage, divisors, self._forms.get(stage.outputs[0], PLAIN), self._device)
            case Choose():
                return self._choose(stage)
        return self._single(stage)

    def _dense(self, node: Tensor) -> torch.Tensor:
        """A small weight (a norm's, a bias) as float32."""
        return self._weights[node.name].to(self._device).unpack().contiguous()

    def _rows_for(self, node: Tensor) -> Rows:
        return Rows.empty(self._forms.get(node, PLAIN), node.shape[0], node.shape[1], self._device)

    def _embed(self, stage: Embed) -> Step:
        (table, ids), (out,) = stage.inputs, stage.outputs
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
        (x, weight, *ids), (out,) = stage.inputs, stage.outputs
        scale, eps = self._dense(weight), stage.eps

        def step(values: Values) -> None:
            chosen = values.plain(ids[0]) if ids else None
            values.put(out, rms_norm(values.plain(x).contiguous(), scale, eps, self._rows_for(out), chosen))

        return step

    def _linear(self, stage: Linear) -> Step:
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

    def _gate(self, stage: Gate) -> Step:
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

    def _choose(self, stage: Choose) -> Step:
        (table, ids), (out,) = stage.inputs, stage.outputs

        def step(values: Values) -> None:
            rows = values.plain(ids)
            chosen = values.plain(table)[rows.clamp(min=0).long()]
            values.put(out, torch.where((rows >= 0).view(-1, *[1] * (chosen.dim() - 1)), chosen, 0.0))

        return step

    def _single(self, stage: Stage) -> Step:
        (node,) = stage.outputs
        fixed = {t: self._weights[t.name].to(self._device) for t in stage.inputs if t.name in self._weights}

        def step(values: Values) -> None:
            values.put(
                node, node.op.reference([fixed[t] if t in fixed else values.plain(t) for t in stage.inputs])
            )

        return step
