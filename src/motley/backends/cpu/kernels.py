"""Which stages the native kernels can compute: pure predicates, with the reason if they cannot."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from motley.backends.cpu.native import (
    FORMATS,
    FUNCTIONS,
    GROUP_ROWS,
    HAS_RECURRENT,
    MAX_EXPERT_GROUPS,
    MAX_EXPERTS,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_PARTS,
    MAX_RANGES,
    PLAIN_FORMATS,
)
from motley.graph import F32, Op, Tensor
from motley.graph.ops import (
    Activation,
    Add,
    Attention,
    CacheStore,
    CausalConv,
    Concat,
    DeltaNet,
    ExpertFfn,
    GetRows,
    Hadamard,
    LocalIds,
    MatMul,
    Mul,
    Permute,
    Repeat,
    Rope,
    Route,
    RouteWeights,
    Scale,
    Slice,
    Softmax,
    Weight,
)
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
)
from motley.split.collectives import Place, Shard

_MAX_AXES = 4  # of strided copies


class NativeKernel:
    """The C++ kernels. They do not run one by one: stages that follow each other become a program (`Compiler`)."""

    name = "native"

    def supports(self, stage: Stage) -> str | None:
        match stage:
            case Linear():
                return _linear(stage)
            case Norm():
                return _norm(stage)
            case Gate():
                return "gates only products, as they are made"
            case AttentionBlock():
                return "takes ropes, cache store and attention one by one"
            case Routing() | Experts() | DeltaRule() | GatedNorm():
                return "takes their nodes one by one"
            case Single():
                predicate = _PREDICATES.get(type(stage.node.op))
                return f"no native {stage.node.op.name}" if predicate is None else predicate(stage.node)


def _linear(stage: Linear) -> str | None:
    if len(stage.parts) > MAX_PARTS:
        return f"more than {MAX_PARTS} products at a time"
    if stage.gate not in FUNCTIONS:
        return f"no native {stage.gate}"
    reasons = (_product(stage.x, part.weight) for part in stage.parts)
    return next((reason for reason in reasons if reason is not None), None)


def _product(x: Tensor, weight: Tensor) -> str | None:
    if weight.dtype not in FORMATS:
        return f"no native {weight.dtype}"
    if weight.dtype in PLAIN_FORMATS and weight.dtype != "F32" and x.shape[-1] % 2:
        return "an odd number of 2-byte columns"
    return None


def _norm(stage: Norm) -> str | None:
    if stage.rows is not None:
        return "norms all rows"
    return None if stage.x.dtype == F32 else "only for f32"


def _floats(node: Tensor) -> str | None:
    is_float = all(t.dtype == F32 or isinstance(t.op, Weight) for t in node.inputs)
    return None if is_float else "only for f32"


def _binary(node: Tensor) -> str | None:
    a, b = node.inputs
    if b.shape == a.shape or repeats_of(a, b) is not None:
        return _floats(node)
    return f"cannot broadcast {b.shape} to {a.shape}"


def repeats_of(a: Tensor, b: Tensor) -> tuple[int, int] | None:
    """How b is read along a: (values before it starts again, times that each is used). None if neither will do."""
    sizes = (1,) * (len(a.shape) - len(b.shape)) + b.shape
    whole = next((i for i, (p, q) in enumerate(zip(a.shape, sizes, strict=True)) if p == q != 1), len(sizes))
    if sizes[whole:] == a.shape[whole:]:  # missing or 1 in front, whole behind
        return max(b.n_values, 1), 1
    last = len(sizes) - next((i for i, q in enumerate(reversed(sizes)) if q != 1), len(sizes))
    if sizes[:last] == a.shape[:last]:  # whole in front, 1 behind
        return max(b.n_values, 1), max(a.n_values // max(b.n_values, 1), 1)
    return None


def _activation(node: Tensor) -> str | None:
    assert isinstance(node.op, Activation)
    return _floats(node) if node.op.function in FUNCTIONS else f"no native {node.op.function}"


def _matmul(node: Tensor) -> str | None:
    return None if isinstance(node.inputs[1].op, Hadamard) else "the matrix is no weight"


def _get_rows(node: Tensor) -> str | None:
    table = node.inputs[0]
    if len(table.shape) != 2:
        return "the table is no matrix"
    if isinstance(table.op, Weight):
        return None if table.dtype in FORMATS else f"no native {table.dtype}"
    return None if table.dtype == F32 else "only for f32"


def _copy(node: Tensor) -> str | None:
    if any(isinstance(t.op, Weight) for t in node.inputs):
        return "copies a weight"
    if len(node.shape) > _MAX_AXES:
        return f"more than {_MAX_AXES} axes"
    return _floats(node)


def _local_ids(node: Tensor) -> str | None:
    assert isinstance(node.op, LocalIds)
    n_ranges = len(list(islice(node.op.word.global_ranges(node.op.device), MAX_RANGES + 1)))
    return None if n_ranges <= MAX_RANGES else f"more than {MAX_RANGES} ranges"


def _rope(node: Tensor) -> str | None:
    if node.inputs[0].dtype != F32:
        return "only for f32"
    is_fixed = all(isinstance(divisors.op, Weight) for divisors in node.inputs[2:])
    return None if is_fixed else "the divisors are no weight"


def _attention(node: Tensor) -> str | None:
    q, cache, *sinks = node.inputs
    if not all(isinstance(sink.op, Weight) for sink in sinks):
        return "the sinks are no weight"
    kv_heads, dim = cache.shape
    return heads_reason(dim, q.shape[1] // kv_heads if kv_heads else 0)


def heads_reason(dim: int, group: int) -> str | None:
    """Why the native kernels do not attend with `group` heads of `dim` for each KV head; None if they do."""
    if dim > MAX_HEAD_DIM:
        return f"heads of {dim} dims, but native kernels have at most {MAX_HEAD_DIM}"
    if group > MAX_GROUP:
        return f"{group} query heads for each KV head, but native kernels have at most {MAX_GROUP}"
    return None


def _route(node: Tensor) -> str | None:
    assert isinstance(node.op, Route)
    n_experts = node.inputs[0].shape[1]
    if n_experts > MAX_EXPERTS or node.op.n_groups > MAX_EXPERT_GROUPS:
        return f"{n_experts} experts in {node.op.n_groups} groups are too many"
    if node.op.needs_softmax(has_bias=len(node.inputs) > 2):
        return "takes no bias or limit of groups with softmax scores"
    return None if all(isinstance(t.op, Weight) for t in node.inputs[2:]) else "the bias is no weight"


def _route_weights(node: Tensor) -> str | None:
    return None


def _expert_ffn(node: Tensor) -> str | None:
    if not all(isinstance(t.op, Weight) for t in node.inputs[3:]):
        return "the experts are no weights"
    for weight in node.inputs[3:6]:
        if weight.shape[1] % GROUP_ROWS:
            return f"an expert's {weight.shape[1]} rows are no multiple of {GROUP_ROWS}"
        reason = _product(weight, weight)
        if reason is not None:
            return reason
    return None if node.n_values and node.inputs[3].n_values else "nothing to compute"


def _causal_conv(node: Tensor) -> str | None:
    if not HAS_RECURRENT:
        return "the native module is older than this kernel"
    if not isinstance(node.inputs[1].op, Weight):
        return "the weight is no weight of the model"
    return None if node.inputs[0].n_values else "no channels"


def _delta_net(node: Tensor) -> str | None:
    if not HAS_RECURRENT:
        return "the native module is older than this kernel"
    if not node.n_values:
        return "no heads"
    dims = node.inputs[3].shape[1:]
    return None if max(dims) <= MAX_HEAD_DIM else f"heads of {max(dims)} dims are longer than {MAX_HEAD_DIM}"


def _cache_store(node: Tensor) -> str | None:
    dim = node.inputs[0].shape[1]
    return heads_reason(dim, 0)


_PREDICATES: dict[type[Op], Callable[[Tensor], str | None]] = {
    MatMul: _matmul,
    Add: _binary,
    Mul: _binary,
    Scale: _floats,
    Activation: _activation,
    Softmax: _floats,
    Rope: _rope,
    CacheStore: _cache_store,
    Attention: _attention,
    Route: _route,
    RouteWeights: _route_weights,
    ExpertFfn: _expert_ffn,
    CausalConv: _causal_conv,
    DeltaNet: _delta_net,
    GetRows: _get_rows,
    Slice: _copy,
    Permute: _copy,
    Concat: _copy,
    Repeat: _copy,
    LocalIds: _local_ids,
    Shard: _copy,
    Place: _copy,
}
