"""Which stages the CUDA kernels take: pure predicates, with the reason where they do not. Needs no Triton."""

from __future__ import annotations

from motley.backends.cuda.planes import BLOCK, PLAIN_KINDS
from motley.formats import QUANTIZERS
from motley.graph import Tensor
from motley.graph.ops import (
    Attention,
    CacheStore,
    CausalConv,
    DeltaNet,
    ExpertFfn,
    GetRows,
    Input,
    LocalIds,
    Route,
    RouteWeights,
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

GATE_FUNCTIONS = ("silu", "gelu_tanh")
MAX_KERNEL_ROWS = (
    128  # of a product with packed weights; above, unpacking and the library's product are faster
)
PIECE_SIZES = (16384, 8192, 4096, 2048)  # tokens of a context that the library's attention takes at once
MIN_PIECE_ROWS, MIN_PIECE_CONTEXT = 512, 4096  # of a sequence in a batch, and before it: measured on an H200
MIN_COPY_ROWS = 33  # from which a product with a matrix's float16 copy is faster than with packed weights
EXPERT_FUNCTIONS = ("silu", "clamped_swiglu")
CACHE_KINDS = ("f32", "f16", "bf16", *(name.lower() for name in QUANTIZERS))


def refuses_cache(k_kind: str, v_kind: str, block_size: int) -> str | None:
    """Why attention cannot read such a cache; None if it can."""
    if unknown := {k_kind, v_kind} - set(CACHE_KINDS):
        return f"no kernel for a cache of {' and '.join(sorted(unknown))}"
    if block_size < 16 or block_size & (block_size - 1):
        return f"blocks of {block_size} tokens are no power of two from 16"
    return None


class CudaKernel:
    """The Triton kernels. `Steps` makes functions of the stages that they take."""

    name = "cuda"

    def supports(self, stage: Stage) -> str | None:
        match stage:
            case Linear():
                return _linear(stage)
            case Norm():
                return _norm(stage)
            case Gate():
                return _gate(stage)
            case AttentionBlock():
                return _attention_block(stage)
            case Routing():
                return _routing(stage)
            case Experts():
                return _expert_ffn(stage.node)
            case DeltaRule():
                return _delta_rule(stage)
            case GatedNorm():
                return _gated_norm(stage)
            case Single():
                return _single(stage)


class DeviceReferenceKernel:
    """An op without a kernel: its reference runs in torch on the device."""

    name = "reference"

    def supports(self, stage: Stage) -> str | None:
        if not isinstance(stage, Single) or stage.rotation:
            return "takes only single nodes"
        if isinstance(stage.node.op, Attention | CacheStore):
            return "the cache has no reference on a GPU"
        if any(isinstance(t.op, Weight) and len(t.shape) in (2, 3) for t in stage.inputs):
            return "matrices are in planes, which only products of rows read"
        return None


def _linear(stage: Linear) -> str | None:
    if len(stage.x.shape) != 2:
        return "the input is no matrix"
    if stage.gate:
        return "gates products in a stage of their own"
    if any(part.bias is not None for part in stage.parts):
        return "adds no bias"
    if len(stage.parts) > 1 and any(part.residual is not None for part in stage.parts):
        return "joins only products without residual"
    if len({part.weight.dtype for part in stage.parts}) > 1:
        return "joins only matrices of one format"
    return None


def _norm(stage: Norm) -> str | None:
    if stage.weight is None or not isinstance(stage.weight.op, Weight):
        return "the factors are no weight"
    if len(stage.out.shape) != 2 or stage.out.shape[1] % BLOCK:
        return f"rows are no whole blocks of {BLOCK}"
    if stage.rows is not None and not isinstance(stage.rows.op, Input):
        return "ids that are computed may be -1"
    return None


def _gate(stage: Gate) -> str | None:
    if stage.function not in GATE_FUNCTIONS:
        return f"no {stage.function}"
    return None if len(stage.out.shape) == 2 else "the input is no matrix"


def _attention_block(stage: AttentionBlock) -> str | None:
    q, k = stage.q, stage.k
    if q.node.op != k.node.op or q.inputs[1:] != k.inputs[1:]:
        return "queries and keys have different ropes"
    if q.rotation != k.rotation or stage.store.rotation != stage.attention.rotation:
        return "what is rotated into the cache is not rotated back"
    if q.rotation and stage.store.rotation not in (0, q.rotation):
        return "keys and values have rotations of different sizes"
    if not all(isinstance(t.op, Weight) for t in stage.attention.inputs[2:]):
        return "the sinks are no weight"
    return None if stage.norms is None else _head_norms(stage.norms)


def _head_norms(norms: tuple[Norm, Norm]) -> str | None:
    if norms[0].eps != norms[1].eps:
        return "norms of queries and keys differ"
    if not all(norm.weight is not None and isinstance(norm.weight.op, Weight) for norm in norms):
        return "the norms' factors are no weights"
    return None


def _routing(stage: Routing) -> str | None:
    if stage.weight.dtype not in PLAIN_KINDS:
        return "the router is packed"
    if stage.bias is not None and not isinstance(stage.bias.op, Weight):
        return "the bias is no weight"
    if stage.shared_gate is not None and stage.shared_gate.weight.dtype != "F32":
        return "the shared expert's gate is packed"
    if stage.norm is not None and (reason := _norm(stage.norm)):
        return reason
    if len(stage.x.shape) != 2 or stage.x.shape[1] % BLOCK:
        return f"rows are no whole blocks of {BLOCK}"
    assert isinstance(stage.route.op, Route)
    return _route(stage.route, stage.route.op)


def _delta_rule(stage: DeltaRule) -> str | None:
    if not all(isinstance(t.op, Weight) for t in (stage.offset, stage.factor)):
        return "offset and factor are no weights"
    return None if stage.node.n_values else "no heads"


def _gated_norm(stage: GatedNorm) -> str | None:
    weight, shape = stage.norm.weight, stage.out.shape
    if weight is None or not isinstance(weight.op, Weight) or stage.norm.rows is not None:
        return "the factors are no weight"
    if stage.function != "silu" or len(shape) != 3 or shape[2] % BLOCK or not stage.out.n_values:
        return f"takes heads of whole blocks of {BLOCK}, with silu"
    return None


def _single(stage: Single) -> str | None:
    if isinstance(stage.node.op, Attention | CacheStore):
        return "takes cache store and attention only as a block: with ropes of both queries and keys"
    if isinstance(stage.node.op, ExpertFfn):
        return _expert_ffn(stage.node)
    if isinstance(stage.node.op, Route):
        return _route(stage.node, stage.node.op)
    if isinstance(stage.node.op, CausalConv):
        is_weight = isinstance(stage.node.inputs[1].op, Weight) and stage.node.inputs[1].dtype == "F32"
        return None if is_weight else "the convolution's weight is no F32"
    if isinstance(stage.node.op, LocalIds | DeltaNet):
        return None
    if isinstance(stage.node.op, RouteWeights):
        return None if stage.node.shape[0] else "no tokens"
    return None if isinstance(stage.node.op, GetRows) and not stage.rotation else f"no {stage.node.op.name}"


def _route(node: Tensor, op: Route) -> str | None:
    if op.n_groups_used < op.n_groups:
        return "no limit of groups"
    if op.needs_softmax(has_bias=len(node.inputs) > 2):
        return "no bias of softmax scores"
    if not all(isinstance(t.op, Weight) for t in node.inputs[2:]):
        return "the bias is no weight"
    return None if node.shape[0] else "no tokens"


def _expert_ffn(node: Tensor) -> str | None:
    assert isinstance(node.op, ExpertFfn)
    if not all(isinstance(t.op, Weight) for t in node.inputs[3:]):
        return "the experts are no weights"
    if node.op.function not in EXPERT_FUNCTIONS:
        return f"no {node.op.function}"
    if any(t.shape[2] % BLOCK for t in node.inputs[3:6]):
        return f"rows are no whole blocks of {BLOCK}"
    return None


def is_lookup(node: Tensor) -> bool:
    """Whether rows of a weight are chosen, rather than of an activation."""
    return isinstance(node.inputs[0].op, Weight)
