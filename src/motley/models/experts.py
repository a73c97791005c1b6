"""The FFN of a layer with experts: router, chosen experts, and the shared expert where there is one."""

from __future__ import annotations

from motley.graph import Tensor
from motley.graph.ops import Activation, Add, ExpertFfn, Mul, Route, RouteWeights
from motley.graph.roles import COLUMNS, EXPERTS, ROUTER, SHARED_FFN, Role
from motley.models.blocks import separate_ffn
from motley.models.builder import LayerBuilder
from motley.models.params import ExpertParams


def expert_ffn(layer: LayerBuilder, x: Tensor, *, function: str = "silu") -> Tensor:
    """Routed experts plus shared ones. Both are added before the all-reduce, so a crew needs only one."""
    experts = layer.params.experts
    assert experts is not None, "read with the model's other numbers"
    routed = _routed(layer, x, experts, function)
    if not experts.n_ff_shared:
        return routed
    shared = separate_ffn(layer, x, experts.n_ff_shared, suffix="_shexp", group=SHARED_FFN)
    if layer.has("ffn_gate_inp_shexp.weight"):
        gate = Activation("sigmoid")(layer.linear(x, "ffn_gate_inp_shexp", 1, layer.role()))
        shared = Mul()(shared, gate, name=layer.label("ffn_gated_shexp"))
    # The shared expert first: where routed experts are on another device, their result comes to this one.
    return Add()(shared, routed, name=layer.label("ffn_experts+shared"))


def _routed(layer: LayerBuilder, x: Tensor, experts: ExpertParams, function: str) -> Tensor:
    n_experts, n_ff, n_embd = experts.n_experts, experts.n_ff, x.shape[1]
    logits = layer.linear(x, "ffn_gate_inp", n_experts, layer.role(ROUTER))
    router = layer.role(ROUTER)
    bias = [layer.vector("exp_probs_b.bias", n_experts, role=router)] if layer.has("exp_probs_b.bias") else []
    max_experts = layer.model.batch.n_experts or experts.n_used
    route = Route(max_experts, experts.score, experts.n_groups, experts.n_groups_used)
    ids = route(logits, layer.model.n_expert_used, *bias, name=layer.label("ffn_expert_ids"))
    weigh = RouteWeights(experts.score, experts.normalizes, experts.scale)
    weights = weigh(logits, ids, name=layer.label("ffn_expert_weights"))
    parts = [
        *_gates_and_ups(layer, "weight", n_experts, n_ff, n_embd, role=layer.role(EXPERTS, 1, COLUMNS)),
        layer.vector("ffn_down_exps.weight", n_experts, n_embd, n_ff, role=layer.role(EXPERTS, 2, COLUMNS)),
    ]
    if any(layer.has(f"ffn_{part}_exps.bias") for part in ("gate", "up", "gate_up", "down")):
        parts += _gates_and_ups(layer, "bias", n_experts, n_ff, role=router)
        parts.append(layer.vector("ffn_down_exps.bias", n_experts, n_embd, role=router))
    return ExpertFfn(function)(x, ids, weights, *parts, name=layer.label("ffn_experts"))


def _gates_and_ups(
    layer: LayerBuilder, kind: str, n_experts: int, n_ff: int, *rest: int, role: Role
) -> list[Tensor]:
    """The experts' gates and ups (experts, ff, …): two tensors of the file, or one with the gates' rows first."""
    names = {f"ffn_gate_exps.{kind}": (0, n_ff), f"ffn_up_exps.{kind}": (n_ff, 2 * n_ff)}
    fused = f"ffn_gate_up_exps.{kind}"
    if not layer.is_fused(fused, *names):
        return [layer.vector(name, n_experts, n_ff, *rest, role=role) for name in names]
    shape, source = (n_experts, 2 * n_ff, *rest), layer.label(fused)
    return [
        layer.model.weight(layer.label(name), *shape, role=role, source=source, middle=middle)
        for name, middle in names.items()
    ]
