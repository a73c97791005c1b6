"""What a backend is: kernels to plan with, and a way to run plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch

from motley.formats import PackedTensor
from motley.plan import DevicePlan, Kernel


class Joint(Protocol):
    """Executables of all devices of a crew, run by one call from one thread."""

    def run(self, inputs: Sequence[Mapping[str, Any]]) -> list[tuple[torch.Tensor, ...]]:
        """Each device's outputs from each device's inputs, as Executable.run."""
        ...


class Executable(ABC):
    """A plan bound to its weights and its memory. Not for two threads at a time."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Compute the graph's outputs from its inputs by name. The results are valid until the next run."""

    @classmethod
    def join(cls, members: Sequence[Self]) -> Joint | None:
        """A way to run the crew's executables (one is a crew, too) without a thread for each; None: there is none."""
        return None

    @property
    @abstractmethod
    def n_activation_bytes(self) -> int: ...


def join(executables: Sequence[Executable]) -> Joint | None:
    """The joint run of executables that are all of one kind which knows how; None otherwise."""
    kinds = {type(executable) for executable in executables}
    return kinds.pop().join(executables) if len(kinds) == 1 else None


class Backend(ABC):
    """What runs one device's plans."""

    name: ClassVar[str]
    device: torch.device = torch.device("cpu")  # where activations and the cache are

    @property
    @abstractmethod
    def kernels(self) -> Sequence[Kernel]:
        """Candidates in order of preference."""

    def refuses_cache(self, k_type: str, v_type: str, block_size: int) -> str | None:
        """Why it cannot attend over such a cache; None if it can."""
        return None

    def bucket(self, n_rows: int) -> int:
        """How many rows a plan for a batch of `n_rows` has; more than that are inert. The whole crew must agree."""
        return n_rows

    def unpacks(self, form: str) -> bool:
        """Whether matrices of that format become 16 bits a value here, for want of a kernel."""
        return False

    def use_threads(self, n_threads: int, cores: Sequence[int] = ()) -> None:
        """What its device may use, and the cores that its threads keep to; said once, before anything is loaded."""
        return

    @abstractmethod
    def load(self, weight: PackedTensor) -> PackedTensor:
        """The weight in this backend's memory."""

    @abstractmethod
    def prepare(self, plan: DevicePlan, weights: Mapping[str, PackedTensor]) -> Executable: ...
