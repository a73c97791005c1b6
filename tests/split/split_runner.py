"""Runs a graph on one device and on several, on the reference kernels, and compares.

Several devices run either in lock step, without threads or plans (fast: thousands of graphs), or on a `ThreadGroup`
with plans and arenas, as models do.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from split_values import CacheValue, parts

from motley.backends.reference import ReferenceBackend
from motley.formats import PackedTensor
from motley.graph import CACHE, I32, Graph, Shape, Tensor
from motley.graph.ops import Weight
from motley.ownership import State, sole_owner
from motley.plan import DevicePlan, Kernel, Single
from motley.runtime.group import CollectiveKernel, PartSizes, ThreadGroup
from motley.runtime.loading import part_of
from motley.split.collectives import Collective, Receive, Send
from motley.split.infer import SplitGraph, infer
from motley.split.localize import LocalGraph, localize

Values = Mapping[str, Any]  # of weights (packed) and inputs, by name
Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class SplitWork:
    """A split graph with each device's share of it and of its values."""

    split: SplitGraph
    shares: tuple[LocalGraph, ...]
    values: tuple[dict[str, Any], ...]  # by name in the device's graph

    @staticmethod
    def of(graph: Graph, values: Values, n_devices: int, placement: Mapping[str, State]) -> SplitWork:
        split = infer(graph, n_devices, placement)
        shares = tuple(localize(split, device) for device in range(n_devices))
        rng = random.Random(0)
        inputs = {t.name: parts(values[t.name], _lies(split, t), n_devices, rng) for t in graph.inputs}
        return SplitWork(split, shares, tuple(_values(s, d, values, inputs) for d, s in enumerate(shares)))


def check_split(
    graph: Graph,
    values: Values,
    n_devices: int,
    placement: Mapping[str, State],
    run: Callable[[SplitWork], Sequence[Outputs]] | None = None,
) -> SplitGraph:
    """Every device has all outputs, as one device makes them; collectives are those that the split graph names."""
    work = SplitWork.of(graph, values, n_devices, placement)
    check_collectives(work)
    expected, scale = run_whole(graph, values)
    for device, outputs in enumerate((run or run_in_lock_step)(work)):
        for node, actual, wanted in zip(graph.outputs, outputs, expected, strict=True):
            assert_close(actual, wanted, scale, f"device {device}, output {node!r}")
    return work.split


def check_collectives(work: SplitWork) -> None:
    """The devices' graphs hold the collectives of the split graph, in its order, and no others."""
    for device, share in enumerate(work.shares):
        found = [t.op.name for t in share.graph.nodes if isinstance(t.op, Collective)]
        wanted = []
        for transition in work.split.collectives:
            if transition.kind != "send":
                wanted.append(transition.kind)
                continue
            wanted += ["send"] * (device == sole_owner(transition.source))
            wanted += ["receive"] * (device == sole_owner(transition.target))
        assert found == wanted, f"device {device} has collectives {found}, not {wanted}"


def assert_close(actual: torch.Tensor, expected: torch.Tensor, scale: float, what: str) -> None:
    """`scale`: of the largest value on the way, which is what rounding errors are relative to."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if expected.dtype == torch.int32:
        assert actual.equal(expected), what
    else:
        torch.testing.assert_close(
            actual, expected, rtol=1e-3, atol=1e-4 * scale, msg=lambda m: f"{what}\n{m}"
        )


def run_whole(graph: Graph, values: Values) -> tuple[Outputs, float]:
    """The outputs on one device, by references alone, and the largest value met (at least 1)."""
    known = {t: _fed(values[t.name]) for t in graph.inputs} | {t: _weight(t, values) for t in graph.weights}
    scale = 1.0
    for node in graph.nodes:
        if node not in known:
            known[node] = node.op.reference([known[t] for t in node.inputs])
        if node.dtype not in (I32, CACHE) and not isinstance(node.op, Weight) and node.n_values:
            scale = max(scale, float(known[node].abs().max()))
    return tuple(known[t] for t in graph.outputs), scale


def run_on_backend(graph: Graph, values: Values, *kernels: Kernel) -> Outputs:
    """As devices run their graphs: a plan over an arena of activations. `kernels` come before the reference's."""
    backend = ReferenceBackend()
    plan = DevicePlan.of(graph, (*kernels, *backend.kernels))
    executable = backend.prepare(plan, {t.name: values[t.name] for t in graph.weights})
    return executable.run({t.name: _fed(values[t.name]) for t in graph.inputs})


def run_on_threads(work: SplitWork) -> list[Outputs]:
    """Outputs of each device of a ThreadGroup."""
    group = ThreadGroup([1] * len(work.shares))

    def run(device: int) -> Outputs:
        kernel = CollectiveKernel(group.lines[device])
        return run_on_backend(work.shares[device].graph, work.values[device], kernel)

    try:
        return group.run(run)
    finally:
        group.close()


def run_in_lock_step(work: SplitWork) -> list[Outputs]:
    """Outputs of each device, all in this thread: each runs until it needs the others."""
    return _LockStep(work).run()


class _LockStep:
    """Devices as generators that stop at each collective, and what each of them waits for."""

    def __init__(self, work: SplitWork) -> None:
        self._devices = [_steps(s.graph, values) for s, values in zip(work.shares, work.values, strict=True)]
        self._waiting: dict[int, tuple[Tensor, list[Any]]] = {}
        self._outputs: dict[int, Outputs] = {}
        self._queues: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)

    def run(self) -> list[Outputs]:
        for device in range(len(self._devices)):
            self._resume(device, None)
        while self._waiting:
            moved = [self._carry_message(device) for device in list(self._waiting)]
            if not any(moved):
                self._exchange()
        return [self._outputs[device] for device in range(len(self._devices))]

    def _resume(self, device: int, result: torch.Tensor | None) -> None:
        try:
            self._waiting[device] = self._devices[device].send(result)
        except StopIteration as stop:
            self._waiting.pop(device, None)
            self._outputs[device] = stop.value

    def _carry_message(self, device: int) -> bool:
        """Go on if the device sends something, or waits for something that was sent."""
        node, inputs = self._waiting[device]
        match node.op:
            case Send(source, target):
                self._queues[source, target].append(inputs[0])
                self._resume(device, torch.empty(0))
                return True
            case Receive(source, target) if self._queues[source, target]:
                line = _Line(device, [self._queues[source, target].popleft()])
                self._resume(device, _collect(node, [], line))
                return True
        return False

    def _exchange(self) -> None:
        """All devices have come to a collective: it must be the same."""
        assert len(self._waiting) == len(self._devices), "a device is done while others wait for it"
        kinds = {node.op.name for node, _ in self._waiting.values()}
        assert len(kinds) == 1, f"devices wait for different things: {kinds}"
        assert kinds != {"receive"}, "devices wait for mail that nobody sends"
        requests = sorted(self._waiting.items())
        heard = [inputs[0] if inputs else None for _, (_, inputs) in requests]
        for device, (node, inputs) in requests:
            self._resume(device, _collect(node, inputs, _Line(device, heard)))


class _Line:
    """What a collective hears in lock step: everybody's tensors are there already."""

    def __init__(self, device: int, heard: Sequence[torch.Tensor | None]) -> None:
        self.device = device
        self.n_devices = len(heard)
        self.reader = 0
        self._heard = heard

    def exchange(self, part: torch.Tensor | None, sizes: PartSizes) -> Sequence[torch.Tensor | None]:
        return self._heard

    def send(self, tensor: torch.Tensor, target: int) -> None:
        raise AssertionError("mail is carried by the lock step")

    def receive(self, source: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        (tensor,) = self._heard
        assert tensor is not None
        return tensor


def _steps(graph: Graph, values: Values) -> Generator[tuple[Tensor, list[Any]], torch.Tensor | None, Outputs]:
    """Computes a graph by references; yields each collective with its inputs and is sent its result."""
    known = {t: _fed(values[t.name]) for t in (*graph.inputs, *graph.weights)}
    for node in graph.nodes:
        if node not in known:
            inputs = [known[t] for t in node.inputs]
            known[node] = (
                (yield node, inputs) if isinstance(node.op, Collective) else node.op.reference(inputs)
            )
    return tuple(known[t] for t in graph.outputs)


def _collect(node: Tensor, inputs: Sequence[Any], line: _Line) -> torch.Tensor:
    out = torch.full(node.shape, -7, dtype=torch.int32 if node.dtype == I32 else torch.float32)
    result: torch.Tensor = CollectiveKernel(line).prepare(Single.of(node))(inputs, out)
    return result


def _lies(split: SplitGraph, source: Tensor) -> State:
    """How an input lies: as it was placed; a cache layer, which does not travel, as its user takes it."""
    if source.dtype == CACHE:
        for node in split.graph.nodes:
            if source in node.inputs:
                return split.ways[node].inputs[node.inputs.index(source)]
    return split.state(source)


def _values(
    share: LocalGraph, device: int, values: Values, inputs: Mapping[str, list[Any]]
) -> dict[str, Any]:
    found = {t.name: inputs[t.name][device] for t in share.graph.inputs}
    for node in share.graph.weights:
        assert isinstance(node.op, Weight)
        found[node.name] = part_of(values[node.op.source], share.layouts[node.name], device, node.op.rows)
        assert found[node.name].shape == node.shape
    return found


def _weight(node: Tensor, values: Values) -> PackedTensor:
    """The whole weight: its source, or the rows of it that it consists of."""
    assert isinstance(node.op, Weight)
    whole: PackedTensor = values[node.op.source]
    pieces = [whole.data[start:stop] for start, stop in node.op.rows]
    return PackedTensor(torch.cat(pieces), whole.format) if pieces else whole


def _fed(value: Any) -> Any:
    return value.layer() if isinstance(value, CacheValue) else value
