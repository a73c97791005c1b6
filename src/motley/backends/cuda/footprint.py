"""The memory that a plan needs on a GPU, and the GPU's free memory, before anything is loaded. Needs no Triton."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from motley.backends.base import Footprint
from motley.backends.cuda.planes import has_planes, plane_bytes
from motley.backends.cuda.support import MAX_KERNEL_ROWS, MIN_PIECE_ROWS, PIECE_SIZES, CudaKernel
from motley.formats import get_format
from motley.graph import Graph, Tensor
from motley.graph.ops import Attention, ExpertFfn
from motley.plan import Linear, activation_bytes, fuse

# Bytes: compiled kernels, the libraries' workspaces, what the allocator loses between its blocks.
RESERVE = 512 << 20
_REPACKING = 4  # bytes of temporary memory for each value of a matrix that is repacked
_UNPACKED = 2  # bytes of each value of a matrix that is unpacked for a product with many rows


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that this process may still take, what torch keeps for later included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def footprint(graph: Graph) -> Footprint:
    weights = sum(stored_bytes(weight) for weight in graph.weights)
    return Footprint(weights, _run_bytes(graph), workspace_bytes(graph))


def _run_bytes(graph: Graph) -> int:
    """The bytes of activations, twice: products read converted copies, which exist beside them for a while."""
    return 2 * activation_bytes(graph)


def stored_bytes(weight: Tensor) -> int:
    """The bytes of a weight on the GPU."""
    if len(weight.shape) in (2, 3):  # a matrix, or those of experts on top of each other
        return plane_bytes(weight.dtype, math.prod(weight.shape[:-1]), weight.shape[-1])
    form = get_format(weight.dtype)
    return math.prod(weight.shape[:-1]) * form.row_bytes(weight.shape[-1])


def workspace_bytes(graph: Graph) -> int:
    """Beside activations: what loading takes, or, if that is more, what batches take for the slots of experts, for
    unpacked matrices or for pieces of long contexts, once by launches and once in captured graphs, whose memory is
    apart.
    """
    stages = list(_linear_stages(graph))
    of_steps = max(
        max(_slot_bytes(graph), default=0),
        _UNPACKED * max(_unpacked(stages), default=0),
        max(_piece_bytes(graph), default=0),
    )
    return RESERVE + max(
        _REPACKING * max(_at_once(graph, stages), default=0), 2 * of_steps + _run_bytes(graph)
    )


def copied_bytes(graph: Graph) -> int:
    """The bytes of float16 copies of all packed matrices that rows are multiplied by."""
    weights = {part.weight for stage in _linear_stages(graph) for part in stage.parts}
    return sum(
        _UNPACKED * weight.n_values for weight in weights if has_planes(weight.dtype, weight.shape[-1])
    )


def _slot_bytes(graph: Graph) -> Iterator[int]:
    """Bytes of an ExpertFfn's hidden values, as float32 and float16, and of its results, before and after the mask."""
    for node in graph.nodes:
        if isinstance(node.op, ExpertFfn):
            (n_embd, n_ff), n_slots = node.inputs[5].shape[1:], node.inputs[1].n_values
            yield n_slots * (6 * n_ff + 8 * n_embd)


def _piece_bytes(graph: Graph) -> Iterator[int]:
    """Bytes of a piece of K and V, and of queries and results, in float16 (`library_attention`)."""
    for node in graph.nodes:
        if isinstance(node.op, Attention) and node.op.window is None and node.shape[0] >= MIN_PIECE_ROWS:
            n_heads, dim = node.inputs[1].shape  # of K and V
            yield 2 * (2 * PIECE_SIZES[0] * n_heads * dim + 2 * node.n_values)


def _at_once(graph: Graph, stages: Iterable[Linear]) -> Iterator[int]:
    """Values that are unpacked together: of a matrix, or of all that one stage multiplies by."""
    yield from (weight.n_values for weight in graph.weights)
    for stage in stages:
        yield sum(part.weight.n_values for part in stage.parts)


def _unpacked(stages: Iterable[Linear]) -> Iterator[int]:
    """Values of the matrices of each stage that unpacks them, for a product by the library."""
    for stage in stages:
        if stage.x.shape[0] > MAX_KERNEL_ROWS:
            yield sum(part.weight.n_values for part in stage.parts)


def _linear_stages(graph: Graph) -> Iterator[Linear]:
    kernel = CudaKernel()
    stages = fuse(graph, lambda stage: kernel.supports(stage) is None)
    return (stage for stage in stages if isinstance(stage, Linear))
