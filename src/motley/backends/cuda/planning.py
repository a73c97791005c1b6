"""The properties of a GPU that plans depend on, without running anything there.

Needs neither Triton nor a GPU: rank 0 plans GPUs of other hosts with it, and their workers run them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from motley.backends.base import Backend, DeviceOffer, Executable, Footprint, LoadedWeight, few_sizes
from motley.backends.cuda.footprint import footprint
from motley.backends.cuda.layouts import Layout, decode_layout
from motley.backends.cuda.planes import BLOCK, has_planes
from motley.backends.cuda.support import CudaKernel, DeviceReferenceKernel, refuses_cache
from motley.formats import PackedTensor
from motley.graph import Graph
from motley.plan import DevicePlan, Kernel

_MANY_ROWS = 256  # of a batch with prompts


class GpuPlanning(Backend):
    """A GPU's kernels, sizes and limits, for plans."""

    name: ClassVar[str] = "cuda"
    has_trees = True
    compiles_kernels: ClassVar[bool] = True

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    @property
    def kernels(self) -> Sequence[Kernel]:
        return CudaKernel(), DeviceReferenceKernel()

    def refuses_cache(self, k_type: str, v_type: str, block_size: int) -> str | None:
        return refuses_cache(k_type, v_type, block_size)

    def unpacks(self, form: str) -> bool:
        return not has_planes(form, BLOCK) and form not in ("F16", "BF16")  # F32: all but a router's few rows

    def bucket(self, n_rows: int) -> int:
        return few_sizes(n_rows)

    def output_bucket(self, n_rows: int, n_outputs: int) -> int:
        """The plan's outputs. Prompts have few sizes: outputs take little time, but a plan takes as long as a step."""
        if n_rows <= _MANY_ROWS or n_outputs <= 1:
            return self.bucket(n_outputs)
        sizes = (size for size in (16, 64) if n_outputs <= size)
        return next(sizes, -(-n_outputs // 64) * 64)

    def layout(self, n_rows: int, n_sequences: int, most_rows: int) -> Layout:
        return decode_layout(self.bucket(n_rows), n_sequences, most_rows)

    def footprint(self, graph: Graph, n_packed: int) -> Footprint:
        return footprint(graph)


class RemoteGpu(GpuPlanning):
    """A GPU of another process, as far as this process plans it."""

    is_remote: ClassVar[bool] = True

    def __init__(self, device: str, offer: DeviceOffer) -> None:
        super().__init__(device)
        self._memory = offer.memory
        self.has_trees = offer.has_trees

    def free_bytes(self) -> int | None:
        return self._memory

    def load(self, weight: PackedTensor) -> LoadedWeight:
        raise AssertionError(f"{self.device} is a device of another process")

    def prepare(self, plan: DevicePlan, weights: Mapping[str, LoadedWeight]) -> Executable:
        raise AssertionError(f"{self.device} is a device of another process")
