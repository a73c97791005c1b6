"""The native CPU backend: a device plan's stages run as programs, with other kernels in between where there must be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

import torch

from motley.backends.base import Backend, Executable
from motley.backends.cpu.addresses import Memory
from motley.backends.cpu.cache import BatchSlot
from motley.backends.cpu.compiler import Compiler
from motley.backends.cpu.fusion import Linear, Meeting, Stage, fuse
from motley.backends.cpu.kernels import NativeKernel
from motley.backends.cpu.memory import lay_out_stages
from motley.backends.cpu.native import core
from motley.backends.cpu.weights import RepackedTensor, can_repack
from motley.backends.paged import PagedLayer
from motley.backends.reference.backend import ReferenceKernel
from motley.backends.threads import n_threads
from motley.errors import ConfigError
from motley.formats import PackedTensor
from motley.graph import CACHE
from motley.plan import DevicePlan, Kernel


class CpuBackend(Backend):
    """Kernels in C++. Activations are quantized to 8 bits before they meet quantized weights."""

    name: ClassVar[str] = "cpu"
    is_exact: ClassVar[bool] = False  # whether activations stay float32

    def __init__(self, instruction_set: str = "") -> None:
        """`instruction_set`: one of the module's, to try it; by default the best that this machine has."""
        if core is None:
            raise ConfigError(
                "the native module is not built", hint="run `make setup`, or use --backend reference"
            )
        self._instruction_set = instruction_set
        self._pools = threading.local()

    @property
    def kernels(self) -> Sequence[Kernel]:
        return NativeKernel(), ReferenceKernel()

    @property
    def pool(self) -> Any:
        """The calling thread's workers."""
        pool = getattr(self._pools, "pool", None)
        if pool is None or pool.n_threads != n_threads():
            pool = self._pools.pool = core.Pool(n_threads(), self._instruction_set)
        return pool

    def load(self, weight: PackedTensor) -> PackedTensor:
        if can_repack(weight):
            return RepackedTensor.of(weight, self.pool)
        return PackedTensor(weight.data.clone(), weight.format)

    def prepare(self, plan: DevicePlan, weights: Mapping[str, PackedTensor]) -> Executable:
        return CpuExecutable(plan, weights, self.pool, is_exact=self.is_exact)


class ExactCpuBackend(CpuBackend):
    """The same with float32 activations throughout: slower, and equal to the reference up to rounding."""

    name: ClassVar[str] = "cpu-exact"
    is_exact: ClassVar[bool] = True


class CpuExecutable(Executable):
    """Compiled at the first run, when the cache's addresses are known, and again if they change."""

    def __init__(
        self, plan: DevicePlan, weights: Mapping[str, PackedTensor], pool: Any, *, is_exact: bool
    ) -> None:
        self._graph = plan.graph
        self._stages = fuse(plan)
        self._weights = weights
        self._pool = pool
        self._is_exact = is_exact
        self._layout = lay_out_stages(plan.graph, self._stages, is_exact)
        self._memory = Memory(self._layout, weights, plan.graph.inputs)
        self._segments: list[Callable[[], Any]] = []
        self._slots: dict[str, BatchSlot] = {}  # by the first cache input that uses it
        self._stores: tuple[Any, ...] | None = None  # those that the segments were compiled for

    @property
    def n_activation_bytes(self) -> int:
        return self._layout.n_bytes

    def run(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        layers: dict[str, PagedLayer] = {
            t.name: inputs[t.name] for t in self._graph.inputs if t.dtype == CACHE
        }
        stores = tuple(store for layer in layers.values() for store in (layer.keys, layer.values))
        if self._stores is None or any(a is not b for a, b in zip(stores, self._stores, strict=True)):
            self._compile(layers)
            self._stores = stores
        for name, buffer in self._memory.inputs.items():
            buffer.copy_(inputs[name])
        for name, slot in self._slots.items():
            slot.fill(layers[name].batch, layers[name].keys.block_size)
        for run in self._segments:
            run()
        return tuple(self._memory.value(t) for t in self._graph.outputs)

    def _compile(self, layers: Mapping[str, PagedLayer]) -> None:
        by_store: dict[int, BatchSlot] = {}  # layers of one group of blocks share their stores
        slots = {name: by_store.setdefault(id(layer.keys), BatchSlot()) for name, layer in layers.items()}
        seen: set[int] = set()
        self._slots = {}
        for name, slot in slots.items():
            if id(slot) not in seen:
                seen.add(id(slot))
                self._slots[name] = slot
        compiler = Compiler(self._memory, self._pool, layers, slots, is_exact=self._is_exact)
        self._segments = []
        for is_native, stages in groupby(self._stages, compiler.can_compile):
            if is_native:
                self._segments.append(compiler.compile(list(stages)).run)
            else:
                self._segments.extend(self._launch(stage) for stage in stages)

    def _launch(self, stage: Stage) -> Callable[[], Any]:
        """A node that no program computes."""
        assert not isinstance(stage, Linear), "matrix products are native"
        node = stage.node
        kernel = stage.kernel if isinstance(stage, Meeting) else ReferenceKernel()
        launch = kernel.prepare(node)
        inputs = [self._memory.value(t) for t in node.inputs]
        out = self._memory.value(node)

        def run() -> None:
            with torch.inference_mode():
                launch(inputs, out)

        return run
