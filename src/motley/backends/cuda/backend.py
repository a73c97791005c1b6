"""The `cuda` backend: stages of Triton kernels, captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from motley.backends.base import Backend, Executable
from motley.backends.cuda.capture import GraphPool
from motley.backends.cuda.executable import CudaExecutable
from motley.backends.cuda.failures import as_device_errors
from motley.backends.cuda.kernels.attention import supports
from motley.backends.cuda.planes import BLOCK, PLAIN_KINDS, has_planes
from motley.backends.cuda.program import Program
from motley.backends.cuda.weights import Matrices, load
from motley.formats import PackedTensor
from motley.graph import Tensor
from motley.plan import DevicePlan, Kernel, Launch


class StagedKernel:
    """Stands for all kernels: which nodes go together is decided when the plan is prepared, for all at once."""

    name = "cuda"

    def supports(self, node: Tensor) -> str | None:
        return None

    def prepare(self, node: Tensor) -> Launch:
        raise AssertionError("stages are prepared as a whole")


class CudaBackend(Backend):
    """One device's; devices of one crew do not share it."""

    name: ClassVar[str] = "cuda"

    def __init__(self, device: str = "cuda:0", *, captures: bool = True) -> None:
        self.device = torch.device(device)
        self._captures = captures
        self._matrices = Matrices(self.device)
        self._pool = GraphPool()

    @property
    def kernels(self) -> Sequence[Kernel]:
        return (StagedKernel(),)

    def refuses_cache(self, k_type: str, v_type: str, block_size: int) -> str | None:
        return supports(k_type, v_type, block_size)

    def unpacks(self, form: str) -> bool:
        return not has_planes(form, BLOCK) and form not in PLAIN_KINDS

    def bucket(self, n_rows: int) -> int:
        """Powers of two up to 16, multiples of 16 up to 256, then eighths between powers of two: few plans."""
        if n_rows <= 16:
            return 1 << max(0, n_rows - 1).bit_length() if n_rows else 0
        step = max(16, 1 << (n_rows - 1).bit_length() - 4)
        return -(-n_rows // step) * step

    def load(self, weight: PackedTensor) -> PackedTensor:
        with as_device_errors(self.device):
            return load(weight, self.device)

    def prepare(self, plan: DevicePlan, weights: Mapping[str, PackedTensor]) -> Executable:
        with as_device_errors(self.device):
            return CudaExecutable(Program(plan, weights, self._matrices, self._pool, captures=self._captures))
