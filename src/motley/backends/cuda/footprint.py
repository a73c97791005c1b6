"""What a plan will need on a GPU, and what the GPU has, before anything is loaded. Needs no Triton."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

import torch

from motley.backends.cuda.planes import to_planes
from motley.formats import PackedTensor, get_format
from motley.graph import Graph, Tensor
from motley.graph.ops import MatMul, Weight

# Bytes: compiled kernels, the libraries' workspaces, what the allocator loses between its blocks.
RESERVE = 512 << 20
_REPACKING = 4  # bytes of temporary memory for each value of a matrix that is repacked


def free_bytes(device: str) -> int:
    """Memory of a GPU that this process may still take, what torch keeps for later included."""
    place = torch.device(device)
    free, _ = torch.cuda.mem_get_info(place)
    return free + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)


def stored_bytes(weight: Tensor) -> int:
    """Of a weight as it lies on the GPU."""
    return _stored_bytes(weight.dtype, weight.shape)


@cache
def _stored_bytes(format_name: str, shape: tuple[int, ...]) -> int:
    form = get_format(format_name)
    size = (*shape[:-1], form.row_bytes(shape[-1]))
    weight = PackedTensor(torch.empty(size, dtype=torch.uint8, device="meta"), form)
    return to_planes(weight).n_bytes if len(shape) == 2 else weight.nbytes


def workspace_bytes(graph: Graph) -> int:
    """Beside activations: what loading takes. A step with many rows takes less, two bytes for each value."""
    return RESERVE + _REPACKING * max(_at_once(graph), default=0)


def _at_once(graph: Graph) -> Iterable[int]:
    """Values that are unpacked together: of a matrix, or of all that `lowering` joins, of one input and one format."""
    sizes = Counter({(weight, weight.dtype): weight.n_values for weight in graph.weights})
    for node in graph.nodes:
        if isinstance(node.op, MatMul) and isinstance(node.inputs[1].op, Weight):
            x, weight = node.inputs
            sizes[x, weight.dtype] += weight.n_values
    return sizes.values()
