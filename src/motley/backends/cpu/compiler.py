"""From stages to native programs: every stage becomes kernel calls on fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from motley.backends.base import HasMessages, HasRendezvous, MessagePlaces
from motley.backends.cpu import experts
from motley.backends.cpu.addresses import Memory
from motley.backends.cpu.cache import BatchSlot, StateSlot, state_view, store_view
from motley.backends.cpu.copies import COPIES, around
from motley.backends.cpu.kernels import NativeKernel, repeats_of
from motley.backends.cpu.memory import coded_input, n_split_values
from motley.backends.cpu.native import FORMATS, FUNCTIONS, ROW_FORMATS, NativeRendezvous, address, core
from motley.backends.cpu.row_counts import Known, rows_of_stage
from motley.backends.cpu.weights import CpuWeight, MappedTensor, RepackedTensor
from motley.backends.paged import PagedLayer, StatePlanes
from motley.graph import Op, Tensor
from motley.graph.ops import (
    INTERLEAVED,
    Activation,
    Add,
    Attention,
    CacheStore,
    CausalConv,
    DeltaNet,
    ExpertFfn,
    GetRows,
    LocalIds,
    MatMul,
    Mul,
    Rope,
    Route,
    RouteWeights,
    Scale,
    Softmax,
    Weight,
)
from motley.graph.ops.recurrent import n_key_heads
from motley.plan import Linear, Norm, Single, Stage, Step, base_of
from motley.split.collectives import AllGather, AllReduce, Broadcast, Collective, Receive, Send


def can_compile(step: Step, weights: Mapping[str, CpuWeight]) -> bool:
    """Whether a program can compute it: a native kernel's, or a collective of native programs among themselves."""
    stage = step.stage
    if not isinstance(stage, Single):
        return True
    if isinstance(stage.node.op, Collective):
        is_native = isinstance(stage.node.op, AllReduce | AllGather | Broadcast | Send | Receive)
        return is_native and _rendezvous(step) is not None
    if isinstance(stage.node.op, GetRows) and isinstance(
        weights.get(stage.node.inputs[0].name), RepackedTensor
    ):
        return False  # only a look at the weights tells
    return step.kernel.name == NativeKernel.name


def _rendezvous(step: Step) -> tuple[NativeRendezvous, int] | None:
    """The rendezvous of native programs, and this device's number there; None: there is none."""
    where, device = (isinstance(step.kernel, HasRendezvous) and step.kernel.rendezvous) or (None, 0)
    return (where, device) if isinstance(where, NativeRendezvous) else None


class Compiler:
    """Adds stages to a program.

    `layers` are the batch's cache inputs by name, `slots` where their batches go; `rows`: the tensors that are by rows;
    `states` and `state_slot`: the same for recurrent states.
    """

    def __init__(
        self,
        memory: Memory,
        pool: Any,
        layers: Mapping[str, PagedLayer],
        slots: Mapping[str, BatchSlot],
        rows: Known,
        states: Mapping[str, StatePlanes],
        state_slot: StateSlot | None,
        *,
        is_exact: bool,
    ) -> None:
        self._memory = memory
        self._pool = pool
        self._layers = layers
        self._slots = slots
        self._rows = rows
        self._states = states
        self._state_slot = state_slot
        self._is_exact = is_exact
        self._quantized: set[Tensor] = set()  # whose codes have been written
        self._rope_tables: dict[tuple[Rope, tuple[Tensor, ...]], int] = {}
        self._program: Any = None

    def compile(self, steps: Sequence[Step]) -> Any:
        """One program of steps that follow each other, each of which `can_compile`."""
        self._program = core.Program(self._pool)
        for step in steps:
            rows = rows_of_stage(step.stage, self._rows)
            self._program.set_rows(rows.kind, rows.n_planned)
            match step.stage:
                case Linear() as stage:
                    self._linear(stage)
                case Norm() as stage:
                    self._norm(stage)
                case Single() as stage:
                    kind = type(stage.node.op)
                    if isinstance(stage.node.op, Collective):
                        self._collective(step, stage.node)
                    elif kind in COPIES:
                        COPIES[kind](self._program, self._memory.address, stage)
                    else:
                        _EMITTERS[kind](self, stage)
                case stage:
                    raise AssertionError(f"not native: {stage}")
        return self._program

    def _linear(self, stage: Linear) -> None:
        x, at = stage.x, self._memory.address
        n_columns = x.shape[-1]
        n_tokens = x.n_values // n_columns if n_columns else prod(x.shape[:-1])
        codes = self._codes(stage, n_tokens)
        parts = []
        for part in stage.parts:
            weight, n_rows = self._memory.weights[part.weight.name], part.weight.shape[0]
            numbers = ROW_FORMATS if isinstance(weight, MappedTensor) else FORMATS
            where, form = address(weight.data), numbers[weight.format.name]
            parts.append((where, form, n_rows, at(part.bias), at(part.residual), at(part.out), n_rows))
        self._program.matmul(
            at(x), n_columns, codes, n_tokens, n_columns, parts, FUNCTIONS[stage.gate], self._is_exact
        )

    def _codes(self, stage: Stage, n_rows: int) -> int:
        """The address of its input's quantized rows, which are there from now on; 0: it takes none."""
        x = coded_input(stage, self._is_exact)
        codes = 0 if x is None else self._memory.codes(x)
        if x is not None and codes and x not in self._quantized:
            n_columns = x.shape[-1]
            self._program.quantize(self._memory.address(x), n_columns, codes, n_rows, n_columns)
            self._quantized.add(x)
        return codes

    def _route(self, stage: Single) -> None:
        experts.add_route(self._program, self._memory, stage.node)

    def _route_weights(self, stage: Single) -> None:
        experts.add_route_weights(self._program, self._memory, stage.node)

    def _expert_ffn(self, stage: Single) -> None:
        codes = self._codes(stage, stage.node.shape[0])
        experts.add_expert_ffn(self._program, self._memory, stage, codes=codes, is_exact=self._is_exact)

    def _norm(self, stage: Norm) -> None:
        n_columns, out, at = stage.x.shape[-1], stage.out, self._memory.address
        n_rows = stage.x.n_values // max(n_columns, 1)
        codes = self._memory.codes(out)
        self._program.norm(at(stage.x), at(stage.weight), at(out), codes, n_rows, n_columns, stage.eps)
        self._quantized.add(out)

    def _rope(self, stage: Single) -> None:
        op, at = _op(stage, Rope), self._memory.address
        x, positions, *divisors = stage.node.inputs
        n_tokens, n_heads, dim = x.shape
        n_pairs = op.n_dims // 2
        key = op, (positions, *divisors)
        if key not in self._rope_tables:
            frequencies = op.frequencies(*(self._memory.dense(d) for d in divisors)).contiguous()
            self._memory.kept.append(frequencies)
            table = self._rope_tables[key] = self._memory.keep(2 * n_tokens * n_pairs)
            self._program.rope_table(
                at(positions), address(frequencies), table, n_tokens, n_pairs, op.magnitude
            )
        table = self._rope_tables[key]
        is_interleaved = op.style == INTERLEAVED
        self._program.rope(
            at(x), at(stage.out), table, n_tokens, n_heads, dim, n_pairs, is_interleaved, stage.rotation
        )

    def _cache_store(self, stage: Single) -> None:
        cache, keys, values = stage.inputs
        layer, slot = self._layer(cache)
        n_heads, dim = cache.shape
        self._program.cache_write(
            self._memory.address(keys),
            self._memory.address(values),
            keys.shape[0],
            n_heads,
            dim,
            layer.keys.block_size,
            store_view(layer.keys, layer.rows),
            store_view(layer.values, layer.rows),
            0,
            stage.rotation,
            slot.native,
        )

    def _attention(self, stage: Single) -> None:
        op, (q, cache, *sinks) = _op(stage, Attention), stage.node.inputs
        layer, slot = self._layer(cache)
        n_tokens, n_heads, dim = q.shape
        n_split = n_split_values(stage.node, self._pool.n_threads)
        self._program.attention(
            self._memory.address(q),
            self._memory.address(stage.out),
            n_tokens,
            n_heads,
            cache.shape[0],
            dim,
            layer.keys.block_size,
            store_view(layer.keys, layer.rows),
            store_view(layer.values, layer.rows),
            op.scale,
            op.window or 0,
            stage.rotation,
            slot.native,
            self._memory.room(stage.node) if n_split else 0,
            n_split,
            self._pool.n_threads,
            self._memory.address(sinks[0]) if sinks else 0,
        )

    def _layer(self, cache: Tensor) -> tuple[PagedLayer, BatchSlot]:
        name = base_of(cache).name
        return self._layers[name], self._slots[name]

    def _causal_conv(self, stage: Single) -> None:
        x, weight, state = stage.node.inputs
        taps = self._memory.dense(weight).t().contiguous()  # (taps, channels)
        self._memory.kept.append(taps)
        at, planes = self._memory.address, self._states[state.name]
        self._program.causal_conv(
            at(x),
            address(taps),
            at(stage.out),
            *x.shape,
            len(taps),
            state_view(planes.states, planes.rings),
            self._own_state_slot.native,
        )

    @property
    def _own_state_slot(self) -> StateSlot:
        assert self._state_slot is not None, "a program with states"
        return self._state_slot

    def _delta_net(self, stage: Single) -> None:
        op, (mixed, decay, beta, state) = _op(stage, DeltaNet), stage.node.inputs
        at, planes = self._memory.address, self._states[state.name]
        n_keys = n_key_heads(mixed.shape[1], state.shape)
        self._program.delta_net(
            at(mixed),
            at(decay),
            at(beta),
            at(stage.out),
            mixed.shape[0],
            n_keys,
            *state.shape,
            op.eps,
            op.is_cyclic,
            state_view(planes.states, planes.rings),
            self._own_state_slot.native,
        )

    def _hadamard(self, stage: Single) -> None:
        x = stage.node.inputs[0]
        size = x.shape[-1]
        self._program.hadamard(
            self._memory.address(x), self._memory.address(stage.out), x.n_values // size, size
        )

    def _binary(self, stage: Single) -> None:
        a, b = stage.node.inputs
        repeats = (a.n_values, 1) if a.shape == b.shape else repeats_of(a, b)
        assert repeats is not None, "checked when the kernel was chosen"
        at, is_product = self._memory.address, isinstance(stage.node.op, Mul)
        self._program.binary(
            at(a), at(b), at(stage.out), a.n_values, max(repeats[0], 1), repeats[1], is_product
        )

    def _unary(self, stage: Single) -> None:
        op, x = stage.node.op, stage.node.inputs[0]
        function = FUNCTIONS[op.function] if isinstance(op, Activation) else 0
        factor = op.factor if isinstance(op, Scale) else 1.0
        self._program.unary(
            self._memory.address(x), self._memory.address(stage.out), x.n_values, function, factor
        )

    def _softmax(self, stage: Single) -> None:
        x = stage.node.inputs[0]
        n_columns = max(x.shape[-1], 1)
        at = self._memory.address
        self._program.softmax(at(x), at(stage.out), x.n_values // n_columns, n_columns)

    def _get_rows(self, stage: Single) -> None:
        table, ids = stage.node.inputs
        n_rows, n_columns = table.shape
        if isinstance(table.op, Weight):
            packed = self._memory.weights[table.name]
            where, form, row_bytes = address(packed.data), FORMATS[packed.format.name], packed.data.shape[-1]
        else:
            where, form, row_bytes = self._memory.address(table), FORMATS["F32"], 4 * n_columns
        at = self._memory.address
        self._program.gather(where, form, row_bytes, n_rows, at(ids), ids.n_values, n_columns, at(stage.out))

    def _local_ids(self, stage: Single) -> None:
        op, ids = _op(stage, LocalIds), stage.node.inputs[0]
        at = self._memory.address
        self._program.local_ids(at(ids), at(stage.out), ids.n_values, list(op.word.global_ranges(op.device)))

    def _collective(self, step: Step, node: Tensor) -> None:
        op, out, where = node.op, self._memory.address(node), _rendezvous(step)
        assert where is not None
        rendezvous, device = where
        assert isinstance(op, Collective)
        group, members = rendezvous.among(op.members)
        own, is_shared = members.index(device), rendezvous.is_shared(group)
        x = self._memory.address(node.inputs[0]) if node.inputs else 0
        places = step.kernel.places.get(node) if isinstance(step.kernel, HasMessages) else None
        if places is not None:
            self._with_messages(node, places, rendezvous.tagged, device)
            return
        match op:
            case AllReduce():
                self._program.all_reduce(group, own, x, out, node.n_values)
            case AllGather(axis, word):
                outer, _, inner = around(node, axis)
                pieces = self._pieces(node, members)
                counts = [word.count(member) * outer * inner for member in members]
                self._program.exchange(group, own, x, pieces, *([counts] if is_shared else []))
            case Send(_, target):
                self._program.send(group, own, target, x, node.inputs[0].n_values)
            case Receive(source, _, _):
                counts = [node.n_values] if is_shared else []
                self._program.receive(group, own, source, out, *counts)
            case Broadcast(root, _):
                flat = (1, 1, 1, node.n_values)
                pieces = [(members.index(root), 0, out, flat, (0, 0, 0, 1), (0, 0, 0, 1))]
                counts = [node.n_values if member == root else 0 for member in members]
                self._program.exchange(group, own, x, pieces, *([counts] if is_shared else []))

    def _pieces(self, node: Tensor, members: Sequence[int]) -> list[tuple[Any, ...]]:
        """The pieces that an all-gather copies from each device's part, as csrc's PieceTuple."""
        assert isinstance(node.op, AllGather)
        word, out = node.op.word, self._memory.address(node)
        outer, total, inner = around(node, node.op.axis)
        pieces: list[tuple[Any, ...]] = []
        for source, member in enumerate(members):
            n, done = word.count(member), 0
            for start, stop in word.global_ranges(member):
                shape = (1, outer, stop - start, inner)
                strides = (0, n * inner, inner, 1), (0, total * inner, inner, 1)
                pieces.append((source, done * inner, out + 4 * start * inner, shape, *strides))
                done += stop - start
        return pieces

    def _with_messages(self, node: Tensor, places: MessagePlaces, tagged: Any, device: int) -> None:
        """A collective with the other device of a crew of two, which is not a native program."""
        op, out, program = node.op, self._memory.address(node), self._program
        x = self._memory.address(node.inputs[0]) if node.inputs else 0
        if places.is_first:
            program.advance(tagged)
        if places.n_sent:
            program.post(tagged, places.sent, x, places.n_sent)
        match op:
            case AllReduce() if places.n_heard:
                program.await_message(tagged, places.heard, out, places.n_heard, x)
            case AllGather():  # without the other device's part if that is empty, or if the result is not read here
                pieces = [p for p in self._pieces(node, (0, 1)) if p[0] == device or places.n_heard]
                program.await_pieces(tagged, places.heard, places.n_heard, device, x, pieces)
            case Receive() | Broadcast() if places.n_heard:
                program.await_message(tagged, places.heard, out, places.n_heard, 0)
            case Broadcast() if x and x != out:
                flat, stride = (1, 1, 1, node.n_values), (0, 0, 0, 1)
                program.copy(x, out, flat, stride, stride)


def _op(stage: Single, kind: type[Any]) -> Any:
    assert isinstance(stage.node.op, kind)
    return stage.node.op


_EMITTERS: dict[type[Op], Callable[[Compiler, Single], None]] = {
    Rope: Compiler._rope,
    CacheStore: Compiler._cache_store,
    Attention: Compiler._attention,
    MatMul: Compiler._hadamard,
    Add: Compiler._binary,
    Mul: Compiler._binary,
    Scale: Compiler._unary,
    Activation: Compiler._unary,
    Softmax: Compiler._softmax,
    GetRows: Compiler._get_rows,
    LocalIds: Compiler._local_ids,
    Route: Compiler._route,
    RouteWeights: Compiler._route_weights,
    ExpertFfn: Compiler._expert_ffn,
    CausalConv: Compiler._causal_conv,
    DeltaNet: Compiler._delta_net,
}
