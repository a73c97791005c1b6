"""What the native kernels can compute: pure predicates on nodes, with the reason where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from motley.backends.cpu.native import FORMATS, FUNCTIONS, MAX_GROUP, MAX_HEAD_DIM, MAX_RANGES, PLAIN_FORMATS
from motley.errors import PlanError
from motley.graph import F32, Op, Tensor
from motley.graph.ops import (
    Activation,
    Add,
    Attention,
    CacheStore,
    Concat,
    GetRows,
    Hadamard,
    LocalIds,
    MatMul,
    Mul,
    Permute,
    Repeat,
    Reshape,
    RmsNorm,
    Rope,
    Scale,
    Slice,
    Softmax,
    Weight,
)
from motley.plan import Launch
from motley.split.collectives import Place, Shard

_MAX_AXES = 4  # of strided copies


class NativeKernel:
    """The C++ kernels. They do not run one by one: a plan's native steps become a program (`compile`)."""

    name = "native"

    def supports(self, node: Tensor) -> str | None:
        predicate = _PREDICATES.get(type(node.op))
        return f"no native {node.op.name}" if predicate is None else predicate(node)

    def prepare(self, node: Tensor) -> Launch:
        raise PlanError(f"native kernels run as programs only, {node.op.name} by itself does not")


def _always(node: Tensor) -> str | None:
    return None


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
    x, weight = node.inputs
    if isinstance(weight.op, Hadamard):
        return None
    if not isinstance(weight.op, Weight):
        return "the matrix is no weight"
    if weight.dtype not in FORMATS:
        return f"no native {weight.dtype}"
    if weight.dtype in PLAIN_FORMATS and weight.dtype != "F32" and x.shape[-1] % 2:
        return "an odd number of 2-byte columns"
    return None


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


def _norm(node: Tensor) -> str | None:
    return None if node.inputs[0].dtype == F32 else "only for f32"


def _rope(node: Tensor) -> str | None:
    is_fixed = all(isinstance(divisors.op, Weight) for divisors in node.inputs[2:])
    return _norm(node) if is_fixed else "the divisors are no weight"


def _attention(node: Tensor) -> str | None:
    q, cache = node.inputs
    kv_heads, dim = cache.shape
    if dim > MAX_HEAD_DIM:
        return f"heads of {dim} dims are longer than {MAX_HEAD_DIM}"
    if kv_heads and q.shape[1] // kv_heads > MAX_GROUP:
        return f"more than {MAX_GROUP} query heads for a KV head"
    return None


def _cache_store(node: Tensor) -> str | None:
    dim = node.inputs[0].shape[1]
    return None if dim <= MAX_HEAD_DIM else f"heads of {dim} dims are longer than {MAX_HEAD_DIM}"


_PREDICATES: dict[type[Op], Callable[[Tensor], str | None]] = {
    Reshape: _always,
    MatMul: _matmul,
    RmsNorm: _norm,
    Add: _binary,
    Mul: _binary,
    Scale: _floats,
    Activation: _activation,
    Softmax: _floats,
    Rope: _rope,
    CacheStore: _cache_store,
    Attention: _attention,
    GetRows: _get_rows,
    Slice: _copy,
    Permute: _copy,
    Concat: _copy,
    Repeat: _copy,
    LocalIds: _local_ids,
    Shard: _copy,
    Place: _copy,
}
