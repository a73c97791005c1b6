"""The native CPU backend: a device plan's stages run as programs, with other kernels in between where there must be."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any, ClassVar

import torch

from motley.backends.base import (
    Backend,
    BatchInputs,
    Executable,
    Joint,
    LoadedWeight,
    Rendezvous,
    SteadyProgram,
    few_sizes,
)
from motley.backends.cpu.addresses import Memory, Scratch
from motley.backends.cpu.cache import BatchSlot, StateSlot
from motley.backends.cpu.compiler import Compiler, can_compile
from motley.backends.cpu.kernels import NativeKernel, heads_reason
from motley.backends.cpu.memory import lay_out_stages
from motley.backends.cpu.native import HAS_RECURRENT, HAS_STEADY, NativeRendezvous, core
from motley.backends.cpu.patterns import PatternChooser
from motley.backends.cpu.row_counts import INPUT_KINDS, OUTPUTS, TOKENS, rows_of_tensors
from motley.backends.cpu.slabs import Slabs
from motley.backends.cpu.steady import CpuSteady
from motley.backends.cpu.weights import (
    CpuWeight,
    MappedTensor,
    RepackedTensor,
    can_map,
    can_repack,
    narrowed,
    own_weights,
)
from motley.backends.paged import PagedLayer, StatePlanes
from motley.backends.reference.backend import ReferenceKernel
from motley.errors import ConfigError, PlanError
from motley.formats import PackedTensor
from motley.graph import CACHE, RECURRENT, Tensor
from motley.graph.ops import CacheStore
from motley.plan import DevicePlan, Kernel, LaunchKernel, Single, Step
from motley.split.collectives import Collective

# Beyond any cache, products with one token wait for memory, whatever the layout of weights: then a file that is mapped
# and not copied is as fast, and there at once. Smaller models are loaded in a moment, and faster when repacked.
_WORTH_MAPPING = 512 << 20  # bytes
_FEW_ROWS = 16  # of the plan for a few requests, or for one with a draft


class CpuBackend(Backend):
    """Kernels in C++. Activations are quantized to 8 bits before products with quantized weights."""

    name: ClassVar[str] = "cpu"
    has_native_collectives: ClassVar[bool] = True
    has_own_threads: ClassVar[bool] = True
    takes_lists: ClassVar[bool] = True
    computes_padding: ClassVar[bool] = False
    has_trees = True
    is_exact: ClassVar[bool] = False  # whether activations stay float32

    def __init__(self, instruction_set: str = "") -> None:
        """`instruction_set`: one of the module's, to try it. Default: MOTLEY_INSTRUCTION_SET, or the best here."""
        if core is None:
            raise ConfigError(
                "the native module is not built", hint="run `make setup`, or use --backend reference"
            )
        self._instruction_set = instruction_set or _given_instruction_set()
        self._n_threads = torch.get_num_threads()
        self._cores: Sequence[int] = ()
        self._is_mapping = False
        self._scratch = Scratch()
        self._slabs = Slabs()
        self._teams: dict[int, Any] = {}  # of crews that this device is the first of, by size

    @property
    def kernels(self) -> Sequence[Kernel]:
        return NativeKernel(), ReferenceKernel()

    def refuses_heads(self, head_dim: int, group: int) -> str | None:
        return heads_reason(head_dim, group)

    def bucket(self, n_rows: int) -> int:
        """Few plans: the rows that a batch does not have are not computed, they only take memory."""
        return _FEW_ROWS if 1 < n_rows <= _FEW_ROWS else few_sizes(n_rows)

    def use_threads(self, n_threads: int, cores: Sequence[int] = ()) -> None:
        self._n_threads, self._cores = n_threads, cores

    def expect_weights(self, n_bytes: int) -> None:
        # The weights of a device with its own cores should be in memory close to them, so they are copied.
        self._is_mapping = n_bytes >= _WORTH_MAPPING and not self.is_exact and not self._cores

    @cached_property
    def _pool(self) -> Any:
        """The device's workers."""
        return core.Pool(self._n_threads, self._instruction_set, list(self._cores))

    @cached_property
    def _patterns(self) -> PatternChooser:
        return PatternChooser(self._pool)

    @property
    def details(self) -> Sequence[str]:
        set_name = self._pool.instruction_set
        return f"{self._pool.n_threads} threads with {set_name} kernels", *self._patterns.report

    @classmethod
    def make_rendezvous(cls, n_devices: int, groups: Sequence[tuple[int, ...]] = ()) -> Rendezvous | None:
        return NativeRendezvous(core.Group(n_devices), groups)

    def load(self, weight: PackedTensor) -> CpuWeight:
        if self._is_mapping and can_map(weight):
            self._patterns.add(weight.format.name, weight.nbytes, is_mapped=True)
            return MappedTensor(weight.data, weight.format)
        weight = narrowed(weight)
        if can_repack(weight):
            self._patterns.add(weight.format.name, weight.nbytes)
            return RepackedTensor.of(weight, self._pool, self._slabs)
        return PackedTensor(weight.data.clone(), weight.format)

    def prepare(self, plan: DevicePlan, weights: Mapping[str, LoadedWeight]) -> Executable:
        return CpuExecutable(plan, weights, self._pool, self._scratch, self._teams, is_exact=self.is_exact)


def _given_instruction_set() -> str:
    name = os.environ.get("MOTLEY_INSTRUCTION_SET", "")
    if name and name not in core.instruction_sets():
        raise ConfigError(
            f"this machine has no kernels for MOTLEY_INSTRUCTION_SET={name}",
            hint=f"it has {', '.join(core.instruction_sets())}",
        )
    return name


class ExactCpuBackend(CpuBackend):
    """The same with float32 activations throughout: slower, and equal to the reference up to rounding."""

    name: ClassVar[str] = "cpu-exact"
    is_exact: ClassVar[bool] = True


class CpuExecutable(Executable):
    """Compiled at the first run, when the addresses of cache and scratch memory are known, and again if they change."""

    def __init__(
        self,
        plan: DevicePlan,
        weights: Mapping[str, LoadedWeight],
        pool: Any,
        scratch: Scratch,
        teams: dict[int, Any],
        *,
        is_exact: bool,
    ) -> None:
        self._graph = plan.graph
        self._steps = plan.steps
        self._pool = pool
        self._teams = teams
        self._is_exact = is_exact
        self._layout = lay_out_stages(plan.graph, plan.stages, pool.n_threads, is_exact=is_exact)
        self._memory = Memory(self._layout, scratch, own_weights(weights), plan.graph.inputs)
        self._compiled_at = 0  # where the scratch memory was
        self._rows = rows_of_tensors(plan.graph)
        self._n_actual = (-1, -1)  # tokens and outputs of the batch; -1: as many as the plan was made for
        self._cache_names = [t.name for t in plan.graph.inputs if t.dtype == CACHE]
        self._state_names = [t.name for t in plan.graph.inputs if t.dtype == RECURRENT]
        # Rows that are stored in the cache, if no input has the number of them.
        is_counted = any(INPUT_KINDS.get(node.name) == TOKENS for node in plan.graph.inputs)
        stored = [node.inputs[1].shape[0] for node in plan.graph.nodes if isinstance(node.op, CacheStore)]
        self._n_uncounted = 0 if is_counted else max(stored, default=0)
        self._states: dict[str, Any] = {}  # the batch's, by name
        self._state_slot = StateSlot() if self._state_names and HAS_RECURRENT else None
        self._layers: list[Any] | None = None  # those that the segments were compiled for
        self._given_layers: Mapping[str, Any] | None = None  # what they were found in
        self._segments: list[Callable[[int, int], Any]] = []
        self._program: Any = None  # all of it, where everything is native
        self._slots: list[tuple[BatchSlot, str]] = []  # with the name of a cache that has the slot's batch
        self._outputs: tuple[torch.Tensor, ...] = ()

    @property
    def n_activation_bytes(self) -> int:
        return self._layout.n_bytes

    @classmethod
    def join(cls, members: Sequence[CpuExecutable]) -> Joint | None:
        is_native = all(can_compile(step, m._memory.weights) for m in members for step in m._steps)
        if not is_native:
            return None
        teams, n_devices = members[0]._teams, len(members)
        if n_devices not in teams:  # its threads serve the crew's plans of all shapes
            teams[n_devices] = core.Team(n_devices)
        return _Joint(members, teams[n_devices])

    def run(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        self._bind(inputs)
        for run in self._segments:
            run(*self._n_actual)
        return self._outputs

    def _bind(self, inputs: Mapping[str, Any]) -> None:
        """Put a batch where the segments will look for it."""
        self.compile(inputs)
        n_actual = {TOKENS: -1, OUTPUTS: -1}
        for name, (address, n_room) in self._memory.input_places.items():
            given = inputs[name]
            if len(given) < n_room:
                n_actual[INPUT_KINDS[name]] = len(given)
            if isinstance(given, list):
                core.put(address, n_room, given)
            else:
                self._memory.inputs[name][: len(given)] = given
        self._n_actual = n_actual[TOKENS], n_actual[OUTPUTS]
        if (
            self._n_uncounted
            and sum(t.n_rows for t in inputs[self._cache_names[0]].batch.tables) < self._n_uncounted
        ):
            raise PlanError("a batch has fewer rows than its plan, and the plan's inputs do not say how many")
        self._states.update((name, inputs[name]) for name in self._state_names)
        if self._state_slot is not None:
            self._state_slot.fill(inputs[self._state_names[0]].batch)
        for slot, name in self._slots:
            slot.fill(inputs[name].batch)

    @property
    def _draft_inputs(self) -> tuple[Any, int, int, list[Any]]:
        """The program, and its inputs that change from token to token, as csrc's DraftTuple."""
        tokens, positions = (
            self._memory.input_places.get(name, (0, 0))[0] for name in ("tokens", "positions")
        )
        return self._program, tokens, positions, [slot.native for slot, _ in self._slots]

    def steady_inputs(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Its program and the places of its inputs, as csrc's SteadyTuple. `inputs`: of a batch of one row for each
        sequence, of which the other rows of a sequence have the same numbers.
        """
        places = dict(self._memory.input_places)
        by_row = [places.pop(name, (0, 0))[0] for name in ("tokens", "positions", "output_rows")]
        others = [(address, inputs[name]) for name, (address, _) in places.items()]
        slots = [(inputs[name].layer.group, slot.native) for slot, name in self._slots]
        return self._program, *by_row, others, slots

    @property
    def counts_rows(self) -> bool:
        """Whether batches may have fewer rows than the plan."""
        return not self._n_uncounted

    def has_program(self, program: Any) -> bool:
        """Whether this is its program, and the memory that it was compiled for is where it was."""
        return self._program is program and self._memory.start == self._compiled_at

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The outputs of the latest batch."""
        return self._outputs

    def compile(self, inputs: Mapping[str, Any]) -> None:
        """Makes the program for a batch's cache, if it was not made or if the cache or the scratch memory has moved."""
        layers = inputs.layers if isinstance(inputs, BatchInputs) else None
        if layers is None or layers is not self._given_layers or self._memory.start != self._compiled_at:
            self._find_layers(inputs)
            self._given_layers = layers

    def _find_layers(self, inputs: Mapping[str, Any]) -> None:
        """Compile again if layers of the cache, or the scratch memory, are elsewhere."""
        layers = [inputs[name].layer for name in (*self._cache_names, *self._state_names)]
        if layers != self._layers or self._memory.start != self._compiled_at:
            self._compile(layers)

    def _compile(self, layers: list[Any]) -> None:
        named: dict[str, PagedLayer] = dict(zip(self._cache_names, layers, strict=False))
        states: dict[str, StatePlanes] = dict(
            zip(self._state_names, layers[len(self._cache_names) :], strict=True)
        )
        by_group: dict[int, tuple[BatchSlot, str]] = {}
        for name, layer in named.items():
            by_group.setdefault(layer.group, (BatchSlot(layer.keys.block_size), name))
        self._slots = list(by_group.values())
        slots = {name: by_group[layer.group][0] for name, layer in named.items()}
        compiler = Compiler(
            self._memory,
            self._pool,
            named,
            slots,
            self._rows,
            states,
            self._state_slot,
            is_exact=self._is_exact,
        )
        self._segments, self._program = [], core.Program(self._pool)
        for is_native, steps in groupby(self._steps, lambda s: can_compile(s, self._memory.weights)):
            if is_native:
                self._program = compiler.compile(list(steps))
                self._segments.append(self._program.run)
            else:
                self._segments.extend(self._launch(step) for step in steps)
        self._outputs = tuple(self._memory.value(t) for t in self._graph.outputs)
        self._layers, self._compiled_at = layers, self._memory.start

    def _launch(self, step: Step) -> Callable[[int, int], Any]:
        """A node that no program computes."""
        stage = step.stage
        assert isinstance(stage, Single), "only single nodes run outside of programs"
        kernel = step.kernel if isinstance(step.kernel, LaunchKernel) else ReferenceKernel()
        launch = kernel.prepare(stage)
        # Devices exchange all rows that the plan was made for: not all of them can do with fewer.
        own = {} if isinstance(stage.node.op, Collective) else self._rows
        places = [(self._place(t), own.get(t)) for t in (stage.out, *stage.inputs)]

        def run(n_tokens: int, n_outputs: int) -> None:
            n_actual = {TOKENS: n_tokens, OUTPUTS: n_outputs}
            out, *inputs = [
                rows.of(value(), n_actual[rows.kind]) if rows and n_actual[rows.kind] >= 0 else value()
                for value, rows in places
            ]
            with torch.inference_mode():
                launch(inputs, out)

        return run

    def _place(self, tensor: Tensor) -> Callable[[], Any]:
        """Gives what a Python kernel takes for it: a state is another object in each batch."""
        if tensor.dtype == RECURRENT:
            return partial(self._states.__getitem__, tensor.name)
        value = self._memory.value(tensor)
        return lambda: value


class _Joint:
    """Devices whose plans are native from end to end: one native call runs them all, each on threads of its own."""

    def __init__(self, members: Sequence[CpuExecutable], team: Any) -> None:
        self._members = members
        self._team = team

    def run(self, inputs: Sequence[Mapping[str, Any]]) -> list[tuple[torch.Tensor, ...]]:
        self._bind(inputs)
        self._team.run([member._program for member in self._members])
        return [member._outputs for member in self._members]

    def draft(
        self,
        inputs: Sequence[Mapping[str, Any]],
        settings: Sequence[Any],
        indexes: Sequence[int],
        n_rounds: int,
    ) -> list[list[int]]:
        self._bind(inputs)
        logits = self._members[0]._outputs[0]
        rounds: list[list[int]] = self._team.draft(
            [member._draft_inputs for member in self._members],
            logits.data_ptr(),
            logits.shape[1],
            settings,
            indexes,
            n_rounds,
        )
        return rounds

    def steady(
        self, inputs: Sequence[Mapping[str, Any]], n_groups: int, settings: Sequence[Any]
    ) -> CpuSteady | None:
        if not HAS_STEADY:
            return None
        self._bind(inputs)
        return CpuSteady(self._members, self._team, inputs, n_groups, settings)

    def add_to(self, steady: SteadyProgram) -> bool:
        if not isinstance(steady, CpuSteady) or not all(member.counts_rows for member in self._members):
            return False
        for member, own in zip(self._members, steady.inputs, strict=True):
            member.compile(own)
        steady.add(self._members)
        return True

    def _bind(self, inputs: Sequence[Mapping[str, Any]]) -> None:
        for member, own in zip(self._members, inputs, strict=True):
            member._bind(own)
            member._program.set_batch(*member._n_actual)
