"""The patterns that become stages, the largest first. A rule is asked at each node that is still free, and gives the
stages that could begin or end there, best first; `fusion.py` takes the first one that is allowed.

To add a pattern: a type in `stages.py`, a rule here, and a kernel in each backend that can take it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from motley.graph import Graph, Tensor
from motley.graph.ops import (
    Activation,
    Add,
    Attention,
    CacheStore,
    DeltaNet,
    ExpertFfn,
    GetRows,
    Hadamard,
    MatMul,
    Mul,
    RmsNorm,
    Rope,
    Route,
    RouteWeights,
    Weight,
)
from motley.plan.fusion import Fusion, Takes, without_views
from motley.plan.stages import (
    AttentionBlock,
    DeltaRule,
    Experts,
    Gate,
    GatedNorm,
    Linear,
    Norm,
    Part,
    Routing,
    Single,
    Stage,
)


def fuse(graph: Graph, takes: Takes) -> tuple[Stage, ...]:
    """The graph as stages that `takes` accepts, and single nodes, in an order in which they can run."""
    return Fusion(graph, takes).run(RULES)


def attention_block(fusion: Fusion, node: Tensor) -> Iterator[Stage]:
    """An attention whose queries and keys come from ropes, with all rotations in between."""
    if not isinstance(node.op, Attention):
        return
    queries, stored = node.inputs[:2]
    if not isinstance(stored.op, CacheStore):
        return
    q, k = _rope_of(fusion, queries), _rope_of(fusion, stored.inputs[1])
    if q is not None and k is not None:
        block = AttentionBlock(q, k, _with_rotated_values(stored), _with_rotation(fusion, node))
        first, second = (_norm_before(rope.inputs[0]) for rope in (q, k))
        if first is not None and second is not None:
            yield replace(block, norms=(first, second))
        yield block


def routing(fusion: Fusion, node: Tensor) -> Iterator[Stage]:
    """A router, the choice of experts and their weights; with the norm before it and the gate of a shared expert."""
    if not isinstance(node.op, RouteWeights):
        return
    logits, route = node.inputs
    product = _product_before(logits)
    if product is None or not isinstance(route.op, Route) or route.inputs[0] is not logits:
        return
    x, part = product
    stage, before = Routing(x, part.weight, part.bias, route, node), _norm_before(x)
    stages = [stage] if before is None else [replace(stage, norm=before), stage]
    gates = [user for user in fusion.users[x] if _is_product(user) and user.shape[1:] == (1,)]
    for gate in gates[:1]:
        yield from (replace(each, shared_gate=Part(gate.inputs[1], gate)) for each in stages)
    yield from stages


def experts(fusion: Fusion, node: Tensor) -> Iterator[Stage]:
    """The FFN of chosen experts and what is added to it: a residual; or a shared expert, gated, and a residual."""
    if not isinstance(node.op, ExpertFfn):
        return
    added = _added_to(fusion, node)
    if added is None:
        return
    other, out = added
    outer = _added_to(fusion, out)
    if outer is not None and isinstance(other.op, Mul):
        shared, gate = other.inputs
        if _is_active(gate, "sigmoid") and shared.shape == node.shape and gate.shape[1:] == (1,):
            yield Experts(node, outer[0], outer[1], (shared, gate.inputs[0]))
    yield Experts(node, other, out)


def _added_to(fusion: Fusion, node: Tensor) -> tuple[Tensor, Tensor] | None:
    """The only tensor that is added to a node, and the sum."""
    user = fusion.only_user(node)
    if user is None or not isinstance(user.op, Add):
        return None
    terms = [tensor for tensor in user.inputs if tensor is not node]
    is_plain = len(terms) == 1 and terms[0].shape == node.shape and not isinstance(terms[0].op, Weight)
    return (terms[0], user) if is_plain else None


def rotated(fusion: Fusion, node: Tensor) -> Iterator[Stage]:
    """A rope or an attention and the rotation of its result; a cache store and the rotation of its values."""
    if isinstance(node.op, Rope | Attention):
        yield _with_rotation(fusion, node)
    elif isinstance(node.op, CacheStore):
        yield _with_rotated_values(node)


def delta_rule(fusion: Fusion, node: Tensor) -> Iterator[Stage]:
    """A DeltaNet with what makes its decay and its strength."""
    if not isinstance(node.op, DeltaNet):
        return
    _, decay, beta, _ = node.inputs
    if not (
        isinstance(decay.op, Mul) and _is_active(beta, "sigmoid") and _is_active(decay.inputs[0], "softplus")
    ):
        return
    softplus, factor = decay.inputs
    added = softplus.inputs[0]
    if isinstance(added.op, Add):
        yield DeltaRule(node, added.inputs[0], beta.inputs[0], added.inputs[1], factor)


def gated_norm(fusion: Fusion, node: Tensor) -> Iterator[Stage]:
    """A norm times the activation of a gate."""
    for first, second, function in _gates(node):
        before = _norm_before(second)
        if before is not None:
            yield GatedNorm(before, first, node, function)


def norm(fusion: Fusion, node: Tensor) -> Iterator[Stage]:
    """A norm, with the choice of rows that leads into it."""
    if not isinstance(node.op, RmsNorm):
        return
    x, *weights = node.inputs
    weight, eps = (weights[0] if weights else None), node.op.eps
    if isinstance(x.op, GetRows) and not isinstance(x.inputs[0].op, Weight):
        yield Norm(x.inputs[0], weight, node, eps, rows=x.inputs[1])
    yield Norm(x, weight, node, eps)


def gated_linear(fusion: Fusion, node: Tensor) -> Iterator[Stage]:
    """activation(gate) · up, where gate and up are products of one input."""
    for gate, up, function in _gates(node):
        first, second = _product_before(gate), _product_before(up)
        if first is not None and second is not None and first[0] is second[0]:
            parts = replace(first[1], out=node), replace(second[1], out=node)
            yield Linear(first[0], parts, function)


def gate(fusion: Fusion, node: Tensor) -> Iterator[Stage]:
    """activation(gate) · up, whatever makes the two."""
    for first, second, function in _gates(node):
        yield Gate(first, second, node, function)


def linear(fusion: Fusion, node: Tensor) -> Iterator[Stage]:
    """A product with what is added to it, and other products of the same input, where a kernel takes them together."""
    if not _is_product(node):
        return
    x, parts = node.inputs[0], list[Part]()
    for product in (node, *(user for user in fusion.users[x] if user is not node)):
        if _is_product(product) and product.inputs[0] is x and fusion.is_free(product):
            part = next((p for p in _parts(fusion, product) if fusion.allows(Linear(x, (p,)))), None)
            if part is not None and fusion.allows(Linear(x, (*parts, part))):
                parts.append(part)
    if parts:
        yield Linear(x, tuple(parts))


RULES: tuple[Callable[[Fusion, Tensor], Iterator[Stage]], ...] = (
    attention_block,
    rotated,
    routing,
    experts,
    delta_rule,
    gated_norm,
    norm,
    gated_linear,
    gate,
    linear,
)


def _is_rotation(node: Tensor) -> bool:
    return isinstance(node.op, MatMul) and isinstance(node.inputs[1].op, Hadamard)


def _is_active(node: Tensor, function: str) -> bool:
    return isinstance(node.op, Activation) and node.op.function == function


def _is_product(node: Tensor) -> bool:
    return isinstance(node.op, MatMul) and isinstance(node.inputs[1].op, Weight)


def _with_rotation(fusion: Fusion, node: Tensor) -> Single:
    """The node with the rotation that alone reads its result, if one does and rotates runs of its last axis."""
    reader = fusion.only_reader(node)
    if reader is not None and _is_rotation(reader) and node.shape[-1] % reader.shape[-1] == 0:
        return Single(node, reader, node.inputs, reader.shape[-1])
    return Single.of(node)


def _with_rotated_values(store: Tensor) -> Single:
    """A cache store that rotates its values, where they come from a rotation of runs of their last axis."""
    cache, keys, values = store.inputs
    rotation = without_views(values)
    if _is_rotation(rotation) and values.shape[-1] % rotation.shape[-1] == 0:
        source = rotation.inputs[0]
        while source.shape != values.shape and source is not without_views(source):
            source = source.inputs[0]
        if source.shape == values.shape:
            return Single(store, store, (cache, keys, source), rotation.shape[-1])
    return Single.of(store)


def _rope_of(fusion: Fusion, tensor: Tensor) -> Single | None:
    """The rope, with its rotation, that makes `tensor` or what it is a view of."""
    made = without_views(tensor)
    node = without_views(made.inputs[0]) if _is_rotation(made) else made
    if not isinstance(node.op, Rope) or node.shape != tensor.shape:
        return None
    rope = _with_rotation(fusion, node)
    return rope if rope.out is made else None


def _norm_before(tensor: Tensor) -> Norm | None:
    """The norm that makes `tensor`."""
    if not isinstance(tensor.op, RmsNorm):
        return None
    x, *weights = tensor.inputs
    return Norm(x, weights[0] if weights else None, tensor, tensor.op.eps)


def _gates(node: Tensor) -> Iterator[tuple[Tensor, Tensor, str]]:
    """(gate, up, function) of activation(gate) · up, whichever factor is the activation."""
    if isinstance(node.op, Mul):
        for active, up in (node.inputs, node.inputs[::-1]):
            if isinstance(active.op, Activation) and active.shape == up.shape:
                yield active.inputs[0], up, active.op.function


def _product_before(tensor: Tensor) -> tuple[Tensor, Part] | None:
    """The input of a product, or of a product and its bias, and the rest."""
    if _is_product(tensor):
        return tensor.inputs[0], Part(tensor.inputs[1], tensor)
    if isinstance(tensor.op, Add) and _is_product(tensor.inputs[0]) and _is_bias(tensor.inputs[1], tensor):
        x, weight = tensor.inputs[0].inputs
        return x, Part(weight, tensor, bias=tensor.inputs[1])
    return None


def _is_bias(tensor: Tensor, out: Tensor) -> bool:
    return isinstance(tensor.op, Weight) and tensor.shape == out.shape[-1:]


def _parts(fusion: Fusion, product: Tensor) -> Iterator[Part]:
    """A product with bias and residual, with one of them, and without."""
    plain = Part(product.inputs[1], product)
    user = fusion.only_user(product)
    if user is not None and isinstance(user.op, Add):
        bias = user.inputs[1]
        if user.inputs[0] is product and _is_bias(bias, product):
            biased = replace(plain, out=user, bias=bias)
            yield from _with_residual(fusion, biased)
            yield biased
    yield from _with_residual(fusion, plain)
    yield plain


def _with_residual(fusion: Fusion, part: Part) -> Iterator[Part]:
    user = fusion.only_user(part.out)
    if user is not None and isinstance(user.op, Add):
        terms = [tensor for tensor in user.inputs if tensor is not part.out]
        is_residual = len(terms) == 1 and terms[0].shape == part.out.shape
        if is_residual and not isinstance(terms[0].op, Weight):
            yield replace(part, out=user, residual=terms[0])
