"""Where everything lies that programs read and write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from motley.backends.cpu.memory import Arena
from motley.backends.cpu.native import address
from motley.formats import PackedTensor
from motley.graph import CACHE, I32, Tensor
from motley.graph.ops import Input, Weight
from motley.plan import base_of


class Memory:
    """Addresses of tensors: the arena, inputs, weights and constants of one executable."""

    def __init__(self, arena: Arena, weights: Mapping[str, PackedTensor], inputs: Iterable[Tensor]) -> None:
        self.layout = arena
        self.weights = weights
        self.arena = torch.empty(arena.n_bytes, dtype=torch.uint8)
        self.inputs = {
            t.name: torch.zeros(t.shape, dtype=torch.int32 if t.dtype == I32 else torch.float32)
            for t in inputs
            if t.dtype != CACHE
        }
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
        offset = self.layout.values.get(base)
        return 0 if offset is None else address(self.arena) + offset

    def codes(self, tensor: Tensor) -> int:
        offset = self.layout.codes.get(tensor)
        return 0 if offset is None else address(self.arena) + offset

    def dense(self, tensor: Tensor) -> torch.Tensor:
        """A weight or constant as float32."""
        if tensor not in self._fixed:
            is_weight = isinstance(tensor.op, Weight)
            value = self.weights[tensor.name].unpack() if is_weight else tensor.op.reference([])
            self._fixed[tensor] = value.float().contiguous()
        return self._fixed[tensor]

    def value(self, tensor: Tensor) -> Any:
        """What a Python kernel is given for it."""
        base = base_of(tensor)
        if isinstance(tensor.op, Weight):
            return self.weights[tensor.name]
        if isinstance(base.op, Input):
            return self.inputs[base.name].view(tensor.shape)
        if base.op.is_constant:
            return self.dense(base).view(tensor.shape)
        start = self.layout.values[base]
        dtype = torch.int32 if tensor.dtype == I32 else torch.float32
        return self.arena[start : start + tensor.n_values * 4].view(dtype).view(tensor.shape)

    def room(self, n_values: int) -> int:
        """The address of so many values that stay."""
        self.kept.append(torch.empty(n_values))
        return address(self.kept[-1])
