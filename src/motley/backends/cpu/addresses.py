"""The addresses of all memory that programs read and write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from motley.backends.cpu.memory import Codes, Layout, Room, Values
from motley.backends.cpu.native import address
from motley.backends.cpu.weights import CpuWeight
from motley.graph import HANDLES, I32, Tensor
from motley.graph.ops import Input, Weight
from motley.plan import base_of


class Scratch:
    """A device's activation memory: its executables run one at a time, so all of them use the same."""

    def __init__(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
        self.start = 0  # its address

    def require(self, n_bytes: int) -> None:
        """There are at least so many from now on. If it has to grow it may move; programs look at where it is."""
        if n_bytes <= len(self.data):
            return
        storage = self.data.untyped_storage()
        if not storage.resizable():  # numpy has a view of it, which has to stay what it is
            self.data = torch.empty(n_bytes, dtype=torch.uint8)
        else:
            # The storage first: a tensor that fails to grow would claim to be larger than its memory.
            storage.resize_(n_bytes)
            self.start = storage.data_ptr()
            self.data.resize_(n_bytes)
        self.start = self.data.data_ptr()


class Memory:
    """Addresses of tensors: the scratch memory, inputs, weights and constants of one executable."""

    def __init__(
        self, layout: Layout, scratch: Scratch, weights: Mapping[str, CpuWeight], inputs: Iterable[Tensor]
    ) -> None:
        self.layout = layout
        self.weights = weights
        self._scratch = scratch
        scratch.require(layout.n_bytes)
        self.inputs = {
            t.name: torch.zeros(t.shape, dtype=torch.int32 if t.dtype == I32 else torch.float32)
            for t in inputs
            if t.dtype not in HANDLES
        }
        # Of each input, the address and the number of values, or of rows.
        self.input_places = {name: (address(tensor), len(tensor)) for name, tensor in self.inputs.items()}
        self._fixed: dict[Tensor, torch.Tensor] = {}  # constants, and weights as float32
        self.kept: list[torch.Tensor] = []  # what else programs have addresses of

    def address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        base = base_of(tensor)
        if isinstance(base.op, Input):
            return address(self.inputs[base.name])
        if isinstance(base.op, Weight) or base.op.is_constant:
            return address(self.dense(base))
        offset = self.layout.offsets.get(Values(base))
        return 0 if offset is None else self.start + offset

    @property
    def start(self) -> int:
        """The present address of the scratch memory."""
        return self._scratch.start

    def codes(self, tensor: Tensor) -> int:
        offset = self.layout.offsets.get(Codes(tensor))
        return 0 if offset is None else self.start + offset

    def room(self, node: Tensor) -> int:
        """The address of the intermediate values of an attention or an expert FFN."""
        return self.start + self.layout.offsets[Room(node)]

    def dense(self, tensor: Tensor) -> torch.Tensor:
        """A weight or constant as float32."""
        if tensor not in self._fixed:
            is_weight = isinstance(tensor.op, Weight)
            value = self.weights[tensor.name].unpack() if is_weight else tensor.op.reference([])
            self._fixed[tensor] = value.float().contiguous()
        return self._fixed[tensor]

    def value(self, tensor: Tensor) -> Any:
        """The value that a Python kernel gets for it."""
        base = base_of(tensor)
        if isinstance(tensor.op, Weight):
            return self.weights[tensor.name]
        if isinstance(base.op, Input):
            return self.inputs[base.name].view(tensor.shape)
        if base.op.is_constant:
            return self.dense(base).view(tensor.shape)
        start = self.layout.offsets[Values(base)]
        dtype = torch.int32 if tensor.dtype == I32 else torch.float32
        return self._scratch.data[start : start + tensor.n_values * 4].view(dtype).view(tensor.shape)

    def keep(self, n_values: int) -> int:
        """The address of so many values that stay."""
        self.kept.append(torch.empty(n_values))
        return address(self.kept[-1])
