"""Batches of programs, one after the other: brought to the GPU by one copy, computed, and where they only decode,
captured the second time and replayed from then on (the first time has compiled the kernels).

A `ThreadRun` is one device's, whose peers are on other hardware and run on threads of their own: its segments are
captured one by one, and between them the plan's collective kernels exchange tensors with the peers; if collectives are
kernels of its own (base.DeviceMessages), everything is captured as one graph. A `JointRun` is of
all devices of a crew, where they lie on one GPU (also of a single one): this thread drives them in lockstep. What they
exchange are tensors of the same memory: a sum is left to its readers, of which each adds the parts in the order of
devices (a norm in its own kernel). A decode batch is one CUDA graph, in which the devices' kernels stand side by side
between collectives.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from motley.backends.cuda.capture import Captured, CaptureError, Lanes, Part, Work, alias_of
from motley.backends.cuda.collectives import run_collective
from motley.backends.cuda.compiling import is_recording
from motley.backends.cuda.failures import as_device_errors
from motley.backends.cuda.kernels.prefill import max_span_rows
from motley.backends.cuda.program import Program, Segment
from motley.backends.cuda.prompt_graphs import PromptGraphs
from motley.backends.cuda.staging import Staged, Staging
from motley.backends.cuda.values import Values
from motley.backends.paged import PagedLayer
from motley.graph import I32, Tensor
from motley.split.collectives import AllReduce, Collective, Receive, Send

_log = logging.getLogger(__name__)

Outputs = list[tuple[torch.Tensor, ...]]  # of each program


@dataclass
class _Decodes:
    """Decode batches of one layout."""

    n_launched: int = 0
    captured: Captured | None = None
    address: int = 0  # of the staging that was captured
    outputs: Outputs = field(default_factory=list)  # of the captured batch


class Run(ABC):
    """Runs batches of programs of one GPU."""

    can_start_again: bool  # after half a capture: no peer has seen it

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs
        self._device = programs[0].device
        self._captures = all(program.captures for program in programs)
        self._pool = programs[0].pool
        self._peak_bytes = 0  # that a run of launches had allocated: a graph needs about as much
        self._staging: Staging | None = None
        self._sources: dict[str, int] = {}  # which program's inputs have a name
        self._groups: dict[
            int, tuple[int, str]
        ] = {}  # of each group of layers, one: its program and its name
        self._state: tuple[int, str] | None = None  # a program and its name of some recurrent state
        self._decodes: dict[tuple[int, int], _Decodes] = defaultdict(_Decodes)  # by the batch's layout
        self._n_prompts = 0
        self._prompt: PromptGraphs | None = None
        self._prompt_outputs: Outputs = []

    @property
    def captures_prompts(self) -> bool:
        return False

    @abstractmethod
    def execute(self, values: Sequence[Values]) -> None:
        """Launch everything."""

    @abstractmethod
    def parts(self, values: Sequence[Values]) -> Iterator[Part]:
        """Everything, for `Captured`."""

    def run(self, inputs: Sequence[Mapping[str, Any]]) -> Outputs:
        """Each program's outputs from its inputs. The results are valid until the next run."""
        with torch.inference_mode(), _current(self._device), as_device_errors(self._device):
            return self._run(inputs)

    def _run(self, inputs: Sequence[Mapping[str, Any]]) -> Outputs:
        staged = self._stage(inputs)
        for program, own in zip(self._programs, inputs, strict=True):
            program.take_floats(own)
        if staged.is_decode:
            return self._run_decode(inputs, staged, self._decodes[staged.layout])
        if self._captures and self.captures_prompts:
            return self._run_prompt(inputs, staged)
        values = self._begin(inputs, staged)
        return self._launch(values)

    def _run_decode(self, inputs: Sequence[Mapping[str, Any]], staged: Staged, before: _Decodes) -> Outputs:
        """A batch that only decodes, after others of its layout: the second one is captured."""
        if before.captured is not None and before.address == staged.address:
            before.captured.replay()
            return before.outputs
        before.n_launched += not is_recording()  # what is captured must be compiled
        values = self._begin(inputs, staged)
        if self._can_capture(before.n_launched):
            try:
                return self._capture(values, staged.address, before)
            except (CaptureError, torch.OutOfMemoryError) as error:
                self._give_up_captures(error, can_start_again=self.can_start_again)
                values = self._begin(inputs, staged)
        return self._launch(values)

    def _run_prompt(self, inputs: Sequence[Mapping[str, Any]], staged: Staged) -> Outputs:
        """A batch with prompts. From the second one of this plan on, most of it is captured."""
        values = self._begin(inputs, staged)
        if self._prompt is not None and self._prompt.address == staged.address:
            self._prompt.replay(values[0])
            return self._prompt_outputs
        self._n_prompts += not is_recording()
        if is_recording() or not self._can_capture(self._n_prompts):
            return self._launch(values)
        self._prompt = None  # the memory of an earlier one is free now
        try:
            self._prompt = PromptGraphs(self._programs[0], values[0], staged.address)
        except (CaptureError, torch.OutOfMemoryError) as error:
            # Some layers may have stored their states already.
            self._give_up_captures(error, can_start_again=self._state is None)
            return self._launch(self._begin(inputs, staged))
        self._prompt_outputs = [tuple(map(alias_of, own)) for own in self._take(values)]
        return self._prompt_outputs

    def _can_capture(self, n_runs: int) -> bool:
        """Whether this run of its kind is captured: not the first, which compiles, nor one without memory for it."""
        if n_runs < 2 or not self._captures:
            return False
        self._captures = self._pool.has_room(self._peak_bytes)
        return self._captures

    def _give_up_captures(self, error: Exception, *, can_start_again: bool) -> None:
        """Launches, which share memory with everything else, may still do. What was captured is dropped."""
        cause = error.cause if isinstance(error, CaptureError) else error
        self._captures = False
        if not can_start_again:
            raise cause
        _log.warning("%s: no CUDA graph, kernels are launched one by one: %s", self._device, cause)
        torch.cuda.empty_cache()

    def _launch(self, values: Sequence[Values]) -> Outputs:
        if not self._captures or is_recording():
            self.execute(values)
        else:
            self._peak_bytes = max(self._peak_bytes, self._pool.peak_of(partial(self.execute, values)))
        return self._take(values)

    def _begin(self, inputs: Sequence[Mapping[str, Any]], staged: Staged) -> list[Values]:
        return [program.begin(own, staged) for program, own in zip(self._programs, inputs, strict=True)]

    def _capture(self, values: Sequence[Values], address: int, decodes: _Decodes) -> Outputs:
        decodes.captured = None  # the memory of an earlier one is free now
        decodes.captured = Captured(self.parts(values), self._pool)
        decodes.address = address
        decodes.outputs = [tuple(map(alias_of, own)) for own in self._take(values)]
        return decodes.outputs

    def _take(self, values: Sequence[Values]) -> Outputs:
        return [program.outputs(own) for program, own in zip(self._programs, values, strict=True)]

    def _stage(self, inputs: Sequence[Mapping[str, Any]]) -> Staged:
        if self._staging is None:
            self._prepare_staging(inputs)
        assert self._staging is not None
        batches = {group: inputs[p][name].batch for group, (p, name) in self._groups.items()}
        given = {name: inputs[p][name] for name, p in self._sources.items()}
        states = None
        if self._state is not None:
            program, name = self._state
            states = inputs[program][name].batch
        return self._staging.write(given, batches, states)

    def _prepare_staging(self, inputs: Sequence[Mapping[str, Any]]) -> None:
        """All devices get the same numbers: find out once which program has which input."""
        self._sources = {name: p for p, program in enumerate(self._programs) for name in program.sizes}
        for p, (program, own) in enumerate(zip(self._programs, inputs, strict=True)):
            for name in program.cache_names:
                self._groups.setdefault(own[name].layer.group, (p, name))
        sizes = {name: self._programs[p].sizes[name] for name, p in self._sources.items()}
        layers = [inputs[p][name].layer for p, name in self._groups.values()]
        block_size = max((layer.keys.block_size for layer in layers), default=0)
        max_rows = max((_max_span_rows(layer) for layer in layers), default=0)
        named = ((p, name) for p, program in enumerate(self._programs) for name in program.state_names)
        self._state = next(named, None)
        has_states = self._state is not None
        self._staging = Staging(sizes, len(self._groups), block_size, max_rows, self._device, has_states)


class ThreadRun(Run):
    """One program, whose peers are on other hardware."""

    def __init__(self, programs: Sequence[Program]) -> None:
        super().__init__(programs)
        self._messages = programs[0].messages
        self.can_start_again = self._messages is not None
        self._is_alone = False  # its peers do not run

    def record(self, inputs: Sequence[Mapping[str, Any]]) -> Outputs:
        """A run of this device alone, while kernels are recorded and not launched. What peers would send is missing."""
        assert is_recording(), "peers would wait"
        self._is_alone = True
        try:
            return self.run(inputs)
        finally:
            self._is_alone = False

    def _run(self, inputs: Sequence[Mapping[str, Any]]) -> Outputs:
        outputs = super()._run(inputs)
        if self._messages is not None and not self._is_alone:
            self._messages.finish()
        return outputs

    def execute(self, values: Sequence[Values]) -> None:
        for segment in self._programs[0].segments:
            segment.run(values[0])
            self._take_part(segment, values[0])

    def parts(self, values: Sequence[Values]) -> Iterator[Part]:
        if self._messages is not None:
            yield partial(self.execute, values), None
            return
        for segment in self._programs[0].segments:
            work = partial(segment.run, values[0]) if segment.steps else None
            yield work, None if segment.collective is None else partial(self._take_part, segment, values[0])

    def _take_part(self, segment: Segment, values: Values) -> Work:
        """Take part in the collective that ends a segment; returns what does it again, in the same memory."""
        node = segment.collective
        if node is None:
            return lambda: None
        inputs = [values.plain(tensor) for tensor in node.inputs]
        dtype = torch.int32 if node.dtype == I32 else torch.float32
        out = torch.empty(node.shape, dtype=dtype, device=self._device)
        again = partial(self._programs[0].launches[node], inputs, out)
        if self._messages is not None or not self._is_alone:  # messages are kernels, which are recorded
            again()
        values.put(node, out)
        values.forget(segment.dead)
        return again


class JointRun(Run):
    """Runs all programs of a crew in lockstep."""

    can_start_again = True

    @property
    def captures_prompts(self) -> bool:
        return len(self._programs) == 1 and len(self._programs[0].segments) == 1

    def execute(self, values: Sequence[Values]) -> None:
        self._drive(values, Lanes())

    def parts(self, values: Sequence[Values]) -> Iterator[Part]:
        # A device that waits for a message has no other work. A message is also in its sender's memory, and another
        # lane could not know when that memory may be overwritten.
        has_messages = any(
            segment.collective is not None and isinstance(segment.collective.op, Send | Receive)
            for program in self._programs
            for segment in program.segments
        )
        n_lanes = 1 if has_messages else len(self._programs)
        yield partial(self._drive, values, Lanes.side_by_side(n_lanes, self._device)), None

    def _drive(self, values: Sequence[Values], lanes: Lanes) -> None:
        """Run each program up to its next collective, run the collectives whose devices are all there, and so on."""
        todo = [deque(program.segments) for program in self._programs]
        messages: _Messages = defaultdict(deque)
        addends: list[
            torch.Tensor
        ] = []  # of the last sums: all devices read them, until their lanes join again
        ready = list(range(len(todo)))
        while ready:
            with lanes.forked():
                for device in ready:
                    lanes.run(device, partial(todo[device][0].run, values[device]))
            nodes = [segments[0].collective for segments in todo]
            ready = _run_collectives(nodes, values, messages, addends)
            assert ready or not any(nodes), "devices wait for each other"
            for device in ready:
                values[device].forget(todo[device].popleft().dead)


_Messages = dict[tuple[int, int], deque[torch.Tensor]]  # by sender and receiver


def _run_collectives(
    nodes: Sequence[Tensor | None],
    values: Sequence[Values],
    messages: _Messages,
    addends: list[torch.Tensor],
) -> list[int]:
    """Run the collectives that all their devices have reached; returns these devices. Sums are left to their readers,
    which may make them in the kernel that reads them; `addends` becomes what they read.
    """
    addends.clear()
    waiting = {device: node for device, node in enumerate(nodes) if node is not None}
    results: dict[int, torch.Tensor] = {}
    summed: list[int] = []
    for device, node in waiting.items():
        if isinstance(node.op, Send):
            message = values[device].plain(node.inputs[0])
            messages[device, node.op.target].append(message)
            results[device] = message.new_empty(0)
    for device, node in waiting.items():
        if isinstance(node.op, Receive) and messages[node.op.source, device]:
            results[device] = messages[node.op.source, device].popleft()
    reached: dict[tuple[int, ...], dict[int, Tensor]] = defaultdict(dict)  # by the devices that take part
    for device, node in waiting.items():
        if isinstance(node.op, Collective) and not isinstance(node.op, Send | Receive):
            reached[node.op.members or tuple(range(len(values)))][device] = node
    for members, own in reached.items():
        if len(own) == len(members):
            parts = [values[d].plain(n.inputs[0]) if n.inputs else None for d, n in own.items()]
            given = [part for part in parts if part is not None]
            if len(given) == len(parts) and all(isinstance(n.op, AllReduce) for n in own.values()):
                addends += given
                summed += own
                for device, node in own.items():
                    values[device].put_sum(node, given)
                continue
            results |= zip(own, run_collective(list(own.values()), parts, members), strict=True)
    for device, result in results.items():
        values[device].put(waiting[device], result)
    return sorted([*results, *summed])


def _max_span_rows(layer: PagedLayer) -> int:
    return max_span_rows(layer.keys.kind.name, layer.values.kind.name, layer.keys.head_dim)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
