"""What a backend is: kernels to plan with, and a way to run plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from motley.formats import PackedTensor
from motley.plan import DevicePlan, Kernel


class Executable(ABC):
    """A plan bound to its weights and its memory. Not for two threads at a time."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Compute the graph's outputs from its inputs by name. The results are valid until the next run."""

    @property
    @abstractmethod
    def n_activation_bytes(self) -> int: ...


class Backend(ABC):
    name: ClassVar[str]
    device: torch.device = torch.device("cpu")  # where activations and the cache are

    @property
    @abstractmethod
    def kernels(self) -> Sequence[Kernel]:
        """Candidates in order of preference."""

    def refuses_cache(self, k_type: str, v_type: str, head_dim: int, block_size: int) -> str | None:
        """Why it cannot attend over such a cache; None if it can."""
        return None

    @abstractmethod
    def load(self, weight: PackedTensor) -> PackedTensor:
        """The weight in this backend's memory."""

    @abstractmethod
    def prepare(self, plan: DevicePlan, weights: Mapping[str, PackedTensor]) -> Executable: ...
