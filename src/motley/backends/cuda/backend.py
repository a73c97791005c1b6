"""The `cuda` backend: stages of Triton kernels, captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from motley.backends.base import DeviceMessages, Executable, LoadedWeight
from motley.backends.cuda.borrowing import PinnedPages, borrowed_bytes, copy_seconds
from motley.backends.cuda.capture import GraphPool
from motley.backends.cuda.executable import CudaExecutable
from motley.backends.cuda.failures import as_device_errors
from motley.backends.cuda.footprint import copied_bytes, free_bytes
from motley.backends.cuda.messages import PinnedMessages
from motley.backends.cuda.planes import has_planes, join_rows
from motley.backends.cuda.planning import GpuPlanning
from motley.backends.cuda.products import Copies
from motley.backends.cuda.program import Program
from motley.backends.cuda.stand_ins import StandIns
from motley.backends.cuda.support import MIN_COPY_ROWS
from motley.backends.cuda.upload import Uploader
from motley.backends.cuda.weights import BorrowedMatrix, Matrices, Repacker, load, own_weights
from motley.formats import PackedTensor
from motley.graph import Graph, Tensor
from motley.plan import DevicePlan


@dataclass(frozen=True, eq=False)
class _Model:
    """What all plans of one model share."""

    weights: Mapping[str, LoadedWeight]
    matrices: Matrices
    pool: GraphPool


class CudaBackend(GpuPlanning):
    """One device's; devices of one crew do not share it."""

    def __init__(self, device: str = "cuda:0", *, captures: bool = True) -> None:
        super().__init__(device)
        self._captures = captures
        self.copies = Copies()
        # By the identity of its weights: a model that drafts has the same names of weights, and other graphs.
        self._models: dict[int, _Model] = {}
        self._uploader, self._repacker = Uploader(self.device), Repacker(self.device)
        self._pinned = PinnedPages(self.device)
        self._n_ahead = 2  # see `borrow`
        self._stand_ins: StandIns | None = None

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
            return load(weight, self.device, self._uploader, self._repacker)

    def stand_in(self, max_bytes: int | None) -> CudaBackend:
        twin = CudaBackend(str(self.device), captures=False)
        twin.copies.is_kept = self.copies.is_kept
        twin._stand_ins = StandIns(self.device, max_bytes)
        return twin

    def weight_like(self, weight: Tensor) -> LoadedWeight:
        assert self._stand_ins is not None, "only a stand-in has no contents"
        with as_device_errors(self.device):
            return self._stand_ins.weight(weight)

    def borrowed_like(self, weight: Tensor) -> LoadedWeight:
        assert self._stand_ins is not None, "only a stand-in has no contents"
        return self._stand_ins.borrowed(weight)

    def can_borrow(self, weight: Tensor) -> bool:
        return len(weight.shape) in (2, 3) and has_planes(weight.dtype, weight.shape[-1])

    def borrow(self, weights: Mapping[str, PackedTensor], n_ahead: int) -> Mapping[str, LoadedWeight] | None:
        self._n_ahead = n_ahead
        with as_device_errors(self.device):
            if not self._pinned.pin([weight.data for weight in weights.values()]):
                return None
            return {name: BorrowedMatrix(weight) for name, weight in weights.items()}

    def copy_seconds(self, weights: Sequence[LoadedWeight]) -> float | None:
        sources = [each.source.data for each in weights if isinstance(each, BorrowedMatrix)]
        with as_device_errors(self.device):
            return copy_seconds(sources, self.device)

    def borrowed_bytes(self, graph: Graph, resident: Collection[str], n_ahead: int) -> int:
        return borrowed_bytes((each for each in graph.weights if each.name not in resident), n_ahead)

    def make_messages(self) -> DeviceMessages | None:
        with as_device_errors(self.device):
            return PinnedMessages(self.device, is_stand_in=self._stand_ins is not None)

    def finish_loading(self) -> None:
        with as_device_errors(self.device):
            self._uploader.finish()
            self._repacker.finish()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what repacking took: a graph's memory is apart from torch's other memory

    def prepare(self, plan: DevicePlan, weights: Mapping[str, LoadedWeight]) -> Executable:
        with as_device_errors(self.device):
            model = self._models.get(id(weights))
            if model is None:
                twin = self._stand_ins
                how = (join_rows, None) if twin is None else (twin.join, twin.borrowed_planes)
                matrices = Matrices(self.device, self.copies, self._n_ahead, *how)
                model = _Model(weights, matrices, GraphPool(self.device))
                self._models[id(weights)] = model
            own = own_weights(weights)
            program = Program(plan, own, model.matrices, model.pool, captures=self._captures)
            return CudaExecutable(program)
