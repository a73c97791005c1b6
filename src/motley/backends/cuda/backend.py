"""The `cuda` backend: stages of Triton kernels, captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from motley.backends.base import Backend, Executable, Footprint, LoadedWeight, few_sizes
from motley.backends.cuda.capture import GraphPool
from motley.backends.cuda.executable import CudaExecutable
from motley.backends.cuda.failures import as_device_errors
from motley.backends.cuda.footprint import copied_bytes, footprint, free_bytes
from motley.backends.cuda.kernels.attention import supports
from motley.backends.cuda.planes import BLOCK, has_planes
from motley.backends.cuda.products import Copies
from motley.backends.cuda.program import Program
from motley.backends.cuda.support import MIN_COPY_ROWS, CudaKernel, DeviceReferenceKernel
from motley.backends.cuda.upload import Uploader
from motley.backends.cuda.weights import Matrices, load, own_weights
from motley.formats import PackedTensor
from motley.graph import Graph
from motley.plan import DevicePlan, Kernel

_MANY_ROWS = 256  # of a batch with prompts


@dataclass(frozen=True, eq=False)
class _Model:
    """What all plans of one model share."""

    weights: Mapping[str, LoadedWeight]
    matrices: Matrices
    pool: GraphPool


class CudaBackend(Backend):
    """One device's; devices of one crew do not share it."""

    name: ClassVar[str] = "cuda"

    def __init__(self, device: str = "cuda:0", *, captures: bool = True) -> None:
        self.device = torch.device(device)
        self._captures = captures
        self.copies = Copies()
        # By the identity of its weights: a model that drafts has the same names of weights, and other graphs.
        self._models: dict[int, _Model] = {}
        self._uploader = Uploader(self.device)

    @property
    def kernels(self) -> Sequence[Kernel]:
        return CudaKernel(), DeviceReferenceKernel()

    def refuses_cache(self, k_type: str, v_type: str, block_size: int) -> str | None:
        return supports(k_type, v_type, block_size)

    def unpacks(self, form: str) -> bool:
        return not has_planes(form, BLOCK) and form not in ("F16", "BF16")  # F32: all but a router's few rows

    def bucket(self, n_rows: int) -> int:
        return few_sizes(n_rows)

    def output_bucket(self, n_rows: int, n_outputs: int) -> int:
        """Of prompts, fewer sizes: outputs are a small part of their time, and a plan takes as long as a step."""
        if n_rows <= _MANY_ROWS or n_outputs <= 1:
            return self.bucket(n_outputs)
        sizes = (size for size in (16, 64) if n_outputs <= size)
        return next(sizes, -(-n_outputs // 64) * 64)

    def footprint(self, graph: Graph, n_packed: int) -> Footprint:
        return footprint(graph)

    def free_bytes(self) -> int | None:
        return free_bytes(self.device)

    def offer_spare(self, n_bytes: int, graph: Graph, max_decodes: int) -> None:
        """Half of it at most is used: the GPU may be shared."""
        is_worth_it = max_decodes >= MIN_COPY_ROWS
        self.copies.is_kept = is_worth_it and 0 < copied_bytes(graph) <= n_bytes // 2

    @property
    def kernel_variant(self) -> object:
        return self.copies.is_kept

    @property
    def details(self) -> Sequence[str]:
        if not self.copies.is_kept:
            return ()
        return ("spare memory is used for matrices in 16 bits, for batches of many rows",)

    def load(self, weight: PackedTensor) -> LoadedWeight:
        with as_device_errors(self.device):
            return load(weight, self.device, self._uploader)

    def finish_loading(self) -> None:
        with as_device_errors(self.device):
            self._uploader.finish()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what repacking took: a graph's memory is apart from torch's other memory

    def prepare(self, plan: DevicePlan, weights: Mapping[str, LoadedWeight]) -> Executable:
        with as_device_errors(self.device):
            model = self._models.get(id(weights))
            if model is None:
                model = _Model(weights, Matrices(self.device, self.copies), GraphPool(self.device))
                self._models[id(weights)] = model
            own = own_weights(weights)
            program = Program(plan, own, model.matrices, model.pool, captures=self._captures)
            return CudaExecutable(program)
