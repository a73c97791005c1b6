"""The native CPU backend: a device plan's stages run as programs, with other kernels in between where there must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar

import torch

from motley.backends.base import Backend, Executable, Joint
from motley.backends.cpu.addresses import Memory, Scratch
from motley.backends.cpu.cache import BatchSlot
from motley.backends.cpu.compiler import Compiler, can_compile
from motley.backends.cpu.fusion import Linear, Meeting, Stage, fuse
from motley.backends.cpu.kernels import NativeKernel
from motley.backends.cpu.memory import lay_out_stages
from motley.backends.cpu.native import core
from motley.backends.cpu.weights import RepackedTensor, can_repack
from motley.backends.paged import PagedLayer
from motley.backends.reference.backend import ReferenceKernel
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
        self._n_threads = torch.get_num_threads()
        self._cores: Sequence[int] = ()
        self._scratch = Scratch()
        self._teams: dict[int, Any] = {}  # of crews that this device is the first of, by size

    @property
    def kernels(self) -> Sequence[Kernel]:
        return NativeKernel(), ReferenceKernel()

    def use_threads(self, n_threads: int, cores: Sequence[int] = ()) -> None:
        self._n_threads, self._cores = n_threads, cores

    @cached_property
    def _pool(self) -> Any:
        """The device's workers."""
        return core.Pool(self._n_threads, self._instruction_set, list(self._cores))

    def load(self, weight: PackedTensor) -> PackedTensor:
        if can_repack(weight):
            return RepackedTensor.of(weight, self._pool)
        return PackedTensor(weight.data.clone(), weight.format)

    def prepare(self, plan: DevicePlan, weights: Mapping[str, PackedTensor]) -> Executable:
        return CpuExecutable(plan, weights, self._pool, self._scratch, self._teams, is_exact=self.is_exact)


class ExactCpuBackend(CpuBackend):
    """The same with float32 activations throughout: slower, and equal to the reference up to rounding."""

    name: ClassVar[str] = "cpu-exact"
    is_exact: ClassVar[bool] = True


class CpuExecutable(Executable):
    """Compiled at the first run, when the addresses of cache and scratch memory are known, and again if they change."""

    def __init__(
        self,
        plan: DevicePlan,
        weights: Mapping[str, PackedTensor],
        pool: Any,
        scratch: Scratch,
        teams: dict[int, Any],
        *,
        is_exact: bool,
    ) -> None:
        self._graph = plan.graph
        self._stages = fuse(plan)
        self._pool = pool
        self._teams = teams
        self._is_exact = is_exact
        self._layout = lay_out_stages(plan.graph, self._stages, pool.n_threads, is_exact=is_exact)
        self._memory = Memory(self._layout, scratch, weights, plan.graph.inputs)
        self._compiled_at = 0  # where the scratch memory was
        self._cache_names = [t.name for t in plan.graph.inputs if t.dtype == CACHE]
        self._layers: list[PagedLayer] | None = None  # those that the segments were compiled for
        self._segments: list[Callable[[], Any]] = []
        self._program: Any = None  # all of it, where everything is native
        self._slots: list[tuple[BatchSlot, PagedLayer]] = []  # with a layer that has the slot's batch
        self._outputs: tuple[torch.Tensor, ...] = ()

    @property
    def n_activation_bytes(self) -> int:
        return self._layout.n_bytes

    @classmethod
    def join(cls, members: Sequence[CpuExecutable]) -> Joint | None:
        is_native = all(can_compile(stage, m._memory.weights) for m in members for stage in m._stages)
        if not is_native:
            return None
        teams, n_devices = members[0]._teams, len(members)
        if n_devices not in teams:  # its threads serve the crew's plans of all shapes
            teams[n_devices] = core.Team(n_devices)
        return _Joint(members, teams[n_devices])

    def run(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        self._bind(inputs)
        for run in self._segments:
            run()
        return self._outputs

    def _bind(self, inputs: Mapping[str, Any]) -> None:
        """Put a batch where the segments will look for it."""
        layers = [inputs[name] for name in self._cache_names]
        if layers != self._layers or self._memory.start != self._compiled_at:
            self._compile(layers)
        for name, buffer in self._memory.inputs.items():
            buffer.copy_(inputs[name])
        for slot, layer in self._slots:
            slot.fill(layer.batch)

    def _compile(self, layers: list[PagedLayer]) -> None:
        by_store: dict[int, tuple[BatchSlot, PagedLayer]] = {}  # layers of one group share their stores
        for layer in layers:
            by_store.setdefault(id(layer.keys), (BatchSlot(), layer))
        self._slots = list(by_store.values())
        named = dict(zip(self._cache_names, layers, strict=True))
        slots = {name: by_store[id(layer.keys)][0] for name, layer in named.items()}
        compiler = Compiler(self._memory, self._pool, named, slots, is_exact=self._is_exact)
        self._segments, self._program = [], core.Program(self._pool)
        for is_native, stages in groupby(self._stages, lambda s: can_compile(s, self._memory.weights)):
            if is_native:
                self._program = compiler.compile(list(stages))
                self._segments.append(self._program.run)
            else:
                self._segments.extend(self._launch(stage) for stage in stages)
        self._outputs = tuple(self._memory.value(t) for t in self._graph.outputs)
        self._layers, self._compiled_at = layers, self._memory.start

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


class _Joint:
    """Devices whose plans are native from end to end: one native call runs them all, each on threads of its own."""

    def __init__(self, members: Sequence[CpuExecutable], team: Any) -> None:
        self._members = members
        self._team = team

    def run(self, inputs: Sequence[Mapping[str, Any]]) -> list[tuple[torch.Tensor, ...]]:
        for member, own in zip(self._members, inputs, strict=True):
            member._bind(own)
        self._team.run([member._program for member in self._members])
        return [member._outputs for member in self._members]
