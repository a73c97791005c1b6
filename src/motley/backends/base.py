"""The interface of backends: kernels to plan with, a way to run plans, and the memory that they take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import torch

from motley.formats import PackedTensor
from motley.graph import Graph, Tensor
from motley.plan import DevicePlan, Kernel, activation_bytes
from motley.units import show_bytes


@dataclass(frozen=True)
class Footprint:
    """Bytes that a device needs for a plan, apart from the KV cache."""

    weights: int
    activations: int
    workspace: int = 0  # of kernels and libraries

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.workspace

    def __str__(self) -> str:
        parts = [f"{show_bytes(self.weights)} for weights", f"{show_bytes(self.activations)} for activations"]
        if self.workspace:
            parts.append(f"{show_bytes(self.workspace)} for its kernels' workspace")
        return f"{', '.join(parts[:-1])} and {parts[-1]}"


@dataclass(frozen=True)
class DeviceOffer:
    """A worker's description of one of its devices."""

    memory: int | None = None  # bytes that a crew may use of a GPU, or that the machine has; None: unknown
    has_trees: bool = False  # see Backend


class LoadedWeight(Protocol):
    """A weight in a backend's memory, in whatever form its kernels read. Only that backend looks inside."""

    @property
    def nbytes(self) -> int: ...

    def unpack(self) -> torch.Tensor:
        """The weight's values, float32."""
        ...


class Rendezvous(Protocol):
    """The object in which executables of several devices do collectives among themselves, without Python."""

    aborted_error: type[Exception]  # raised by an executable that waits for a device which has failed

    def abort(self) -> None:
        """Executables that wait there, or come there, fail with `aborted_error`, until `reset`."""
        ...

    def reset(self) -> None: ...


@runtime_checkable
class HostRendezvous(Rendezvous, Protocol):
    """A rendezvous in which devices on other hardware take part, too: each by its own thread, with tensors in the
    host's memory, of 4 bytes per value. All functions raise `aborted_error` if another device has failed.
    """

    def exchange(
        self,
        members: tuple[int, ...],
        device: int,
        part: torch.Tensor | None,
        others: Mapping[int, torch.Tensor],
    ) -> None:
        """Publish a device's part and copy the parts of `others`, by device. `members`: of the group; empty: all."""
        ...

    def send(self, source: int, target: int, values: torch.Tensor) -> None:
        """Waits while the previous message is unread."""
        ...

    def receive(self, source: int, target: int, out: torch.Tensor) -> None: ...

    def attach(self, messages: DeviceMessages) -> bool:
        """Lets the device of a crew of two that is not a native program send its own messages. False: not possible."""
        ...


@runtime_checkable
class HasRendezvous(Protocol):
    """A collective's kernel that can leave it to the executables: their rendezvous, and which device this is."""

    @property
    def rendezvous(self) -> tuple[Rendezvous, int] | None: ...


class MessagePlaces(NamedTuple):
    """The places of a device's messages of one collective, in values, in each direction's memory (DeviceMessages)."""

    is_first: bool  # the first collective of the plan
    sent: int
    n_sent: int  # 0: this device sends nothing
    heard: int
    n_heard: int


class DeviceMessages(Protocol):
    """A device's side of messages with a native program in the host's memory, which the device reads and writes by
    itself, in the order of its kernels (csrc/tagged.hpp). Each run begins with `advance`.
    """

    n_values: int  # that fit, in each direction
    aborted_error: type[Exception]  # raised by `finish` if the device has stopped waiting

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the words that the device writes, of the words that it reads, and of the word that ends its waiting."""
        ...

    def advance(self) -> None: ...

    def post(self, x: torch.Tensor, place: int) -> None: ...

    def fetch(self, place: int, out: torch.Tensor, own: torch.Tensor | None = None) -> None:
        """Read a message to `out`, or its sum with `own`, once it is there."""
        ...

    def finish(self) -> None:
        """Wait until the device has read all messages of the run."""
        ...

    def reset(self, tag: int) -> None:
        """After `abort`, when all programs have ended: the next run has the tag after this one."""
        ...


@runtime_checkable
class HasMessages(Protocol):
    """A collective's kernel on a device that exchanges messages with the other device itself (DeviceMessages)."""

    @property
    def places(self) -> Mapping[Tensor, MessagePlaces]:
        """The message places of each collective of the plan; empty: collectives are done at the rendezvous."""
        ...

    @property
    def messages(self) -> DeviceMessages | None: ...


class BatchInputs(dict[str, Any]):
    """A batch's inputs by name. Cache layers with the batch's block tables are made at their first use: a native
    program needs only one of each group.
    """

    def __init__(self, inputs: Mapping[str, Any], layers: Mapping[str, Any], batches: Sequence[Any]) -> None:
        """`layers`: of the cache, by name, the same mapping in every batch. `batches`: of each group of layers."""
        super().__init__(inputs)
        self.layers = layers
        self._batches = batches

    def __missing__(self, name: str) -> Any:
        layer = self.layers[name]
        self[name] = value = layer.on(self._batches[layer.group])
        return value


class Joint(Protocol):
    """Executables of all devices of a crew, run by one call from one thread."""

    def run(self, inputs: Sequence[Mapping[str, Any]]) -> list[tuple[torch.Tensor, ...]]:
        """Each device's outputs from each device's inputs, as Executable.run."""
        ...


class DraftingJoint(Protocol):
    """A joint run that can also make its outputs its next inputs, without Python in between."""

    def draft(
        self,
        inputs: Sequence[Mapping[str, Any]],
        settings: Sequence[Any],
        indexes: Sequence[int],
        n_rounds: int,
    ) -> list[list[int]]:
        """Tokens for each sequence of a batch with one row each: those of each round, which are the next one's inputs.

        Block tables must reach as far as the last round. `settings`, `indexes`: of each row, as for `choose_rows`. It
        ends early if a row has no token.
        """
        ...

    def steady(
        self, inputs: Sequence[Mapping[str, Any]], n_groups: int, settings: Sequence[Any]
    ) -> SteadyProgram | None:
        """A program for batches like this one, of one row for each sequence: only tokens and positions change.

        `n_groups`: of cache layers. `settings`: of each row, as for `choose_rows`. None: there is none.
        """
        ...

    def add_to(self, steady: SteadyProgram) -> bool:
        """Lets a steady program of the same crew run batches of as many rows as these executables have room for. False:
        it cannot.
        """
        ...


class SteadyProgram(Protocol):
    """Runs the next tokens of the same sequences, and chooses those that follow. Other batches may run in between."""

    @property
    def is_current(self) -> bool:
        """Whether it can still run: the memory that it was made for is where it was."""
        ...

    def place(self, group: int, block_size: int, tables: Sequence[tuple[int, Any]]) -> None:
        """Sets the block tables of a group: for each sequence the position where its blocks begin, and these, int32."""
        ...

    def run(
        self,
        tokens: list[int],
        positions: list[int],
        indexes: list[int],
        n_rounds: int = 1,
        stops: Sequence[int] = (),
    ) -> list[list[int]]:
        """The token after each of `tokens`, as `choose_rows`, then those after these, …: a list for each round.

        Block tables must reach as far as the last round. The round that gives one of `stops`, or no token for a row, is
        the last one.
        """
        ...

    def run_rows(
        self, tokens: list[int], counts: list[int], positions: list[int], indexes: list[int]
    ) -> list[int]:
        """The token after each of `tokens`, which are `counts` of each sequence, from `positions` on: those of drafts,
        as if all of them were right. See `DraftingJoint.add_to`.
        """
        ...


class Executable(ABC):
    """A plan bound to its weights and its memory. Not for two threads at a time."""

    @abstractmethod
    def run(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Compute the graph's outputs from its inputs by name: tensors, and for each cache a paged.BatchLayer.

        The results are valid until the next run.
        """

    @classmethod
    def join(cls, members: Sequence[Self]) -> Joint | None:
        """A way to run the crew's executables (one is a crew, too) without a thread for each; None: there is none."""
        return None

    def record(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Go through a run without the other devices, where the kernels that it would compile are recorded. The results
        are meaningless. Default: there are no such kernels.
        """
        return ()

    @property
    @abstractmethod
    def n_activation_bytes(self) -> int: ...


def join(executables: Sequence[Executable]) -> Joint | None:
    """The joint run of executables that are all of one kind which knows how; None otherwise."""
    kinds = {type(executable) for executable in executables}
    return kinds.pop().join(executables) if len(kinds) == 1 else None


def make_rendezvous(backends: Sequence[Backend], groups: Sequence[tuple[int, ...]] = ()) -> Rendezvous | None:
    """The rendezvous of a crew with devices whose programs do collectives without Python; None: it has no such devices.
    `groups`: of devices that have collectives of their own.

    Devices with another kind of backend take part by their threads (HostRendezvous).
    """
    kinds = {type(backend) for backend in backends}
    native = [kind for kind in kinds if kind.has_native_collectives]
    if len(native) == 1:
        return native[0].make_rendezvous(len(backends), groups)
    return kinds.pop().make_rendezvous(len(backends), groups) if len(kinds) == 1 else None


def few_sizes(n_rows: int) -> int:
    """Powers of two up to 16, multiples of 16 up to 256, then eighths between powers of two: few plans."""
    if n_rows <= 16:
        return 1 << max(0, n_rows - 1).bit_length() if n_rows else 0
    step = max(16, 1 << (n_rows - 1).bit_length() - 4)
    return -(-n_rows // step) * step


class Backend(ABC):
    """Loads weights for one device, and runs its plans."""

    name: ClassVar[str]
    device: torch.device = torch.device("cpu")  # where activations and the cache are
    has_native_collectives: ClassVar[bool] = (
        False  # whether its programs do collectives at a NativeRendezvous
    )
    is_remote: ClassVar[bool] = False  # whether it is only planned here, and runs in another process
    has_trees: bool = False  # whether rows of a sequence may be a tree (paged.Table.seen)

    has_own_threads: ClassVar[bool] = (
        False  # whether kernels run on the backend's threads, whichever thread calls
    )
    computes_padding: ClassVar[bool] = True  # whether rows that pad a plan (`bucket`) take as long as others
    takes_lists: ClassVar[bool] = False  # whether executables take integer inputs as lists, without a tensor
    compiles_kernels: ClassVar[bool] = False  # whether a kernel is compiled at its first launch

    @property
    @abstractmethod
    def kernels(self) -> Sequence[Kernel]:
        """Candidates in order of preference."""

    def refuses_heads(self, head_dim: int, group: int) -> str | None:
        """Why it cannot attend with heads of `head_dim`, `group` of them for each KV head; None if it can."""
        return None

    def refuses_cache(self, k_type: str, v_type: str, block_size: int) -> str | None:
        """Why it cannot attend over such a cache; None if it can."""
        return None

    def bucket(self, n_rows: int) -> int:
        """How many rows a plan for a batch of `n_rows` has; more than that are inert. Devices that
        compute padding must agree, the others of the crew take what these need.
        """
        return n_rows

    def output_bucket(self, n_rows: int, n_outputs: int) -> int:
        """How many output rows a plan has for a batch of `n_rows` with `n_outputs` of them."""
        return self.bucket(n_outputs)

    def layout(self, n_rows: int, n_sequences: int, most_rows: int) -> tuple[int, int]:
        """What a decode batch must have in common with an earlier one of the same plan, beside its shape, so that
        nothing has to be prepared for it. `most_rows`: of a sequence.
        """
        return 0, 0

    def unpacks(self, form: str) -> bool:
        """Whether matrices of that format take 16 bits per value here, because there is no kernel for it."""
        return False

    @classmethod
    def make_rendezvous(cls, n_devices: int, groups: Sequence[tuple[int, ...]] = ()) -> Rendezvous | None:
        """The rendezvous in which devices that all have this backend do collectives; None: the group does them."""
        return None

    def make_messages(self) -> DeviceMessages | None:
        """Messages of a device beside a native program; None: its thread does collectives (HostRendezvous)."""
        return None

    def footprint(self, graph: Graph, n_packed: int) -> Footprint:
        """The memory of the device that running `graph` takes. `n_packed`: bytes of the weights as `load` gets them."""
        return Footprint(n_packed, activation_bytes(graph))

    def free_bytes(self) -> int | None:
        """Memory of its hardware that this process may still take; None: not known to be limited."""
        return None

    def offer_spare(self, n_bytes: int, graph: Graph, max_decodes: int) -> None:
        """Spare memory of its device, to make steps of `graph`'s model faster; said once, before anything is loaded.

        `max_decodes`: rows of the largest step in which all requests decode.
        """
        return

    @property
    def kernel_variant(self) -> object:
        """What kernels depend on beside the model and the hardware: equal values mean the same kernels."""
        return None

    def use_threads(self, n_threads: int, cores: Sequence[int] = ()) -> None:
        """Sets how many threads the device has, and the cores that they stay on. Called once, before loading."""
        return

    def expect_weights(self, n_bytes: int) -> None:
        """How many bytes its device is going to load in all; said once, before `load`."""
        return

    @property
    def details(self) -> Sequence[str]:
        """Sentences about the backend's own choices while weights were loaded, for `--verbose`."""
        return ()

    @abstractmethod
    def load(self, weight: PackedTensor) -> LoadedWeight:
        """The weight in this backend's memory. It may be a view of `weight`, which is part of a mapped file."""

    def stand_in(self, max_bytes: int | None) -> Backend | None:
        """A backend of the same device, to record kernels before any weight is loaded: its weights are `weight_like`,
        and its results are meaningless. None: this backend compiles nothing. `max_bytes`: of memory that it may take.
        """
        return None

    def weight_like(self, weight: Tensor) -> LoadedWeight:
        """For a `stand_in`: a weight of a graph as `load` returns it, without its contents."""
        raise AssertionError(f"{self.name} has no stand-ins")

    def borrowed_like(self, weight: Tensor) -> LoadedWeight:
        """For a `stand_in`: a weight of a graph as `borrow` returns it, without its contents."""
        raise AssertionError(f"{self.name} has no stand-ins")

    def can_borrow(self, weight: Tensor) -> bool:
        """Whether it can compute with these experts, while another device has them; see `borrow`."""
        return False

    def borrow(self, weights: Mapping[str, PackedTensor], n_ahead: int) -> Mapping[str, LoadedWeight] | None:
        """Weights that stay in the host's memory, and that are copied for each batch that needs them; None: the system
        refuses it. They are whole matrices, in a file that is mapped for reading. `n_ahead`: stages whose weights are
        on the device at a time.
        """
        return None

    def copy_seconds(self, weights: Sequence[LoadedWeight]) -> float | None:
        """How long it takes to copy these borrowed weights for a batch, measured; None: not known."""
        return None

    def borrowed_bytes(self, graph: Graph, resident: Collection[str], n_ahead: int) -> int:
        """The device memory that running `graph` takes for the weights that are not `resident`."""
        return 0

    def finish_loading(self) -> None:
        """Releases memory that only loading needs; called after the last weight."""
        return

    @abstractmethod
    def prepare(self, plan: DevicePlan, weights: Mapping[str, LoadedWeight]) -> Executable:
        """`weights` come from this backend's `load`; tables that are only looked up by row may still be packed."""
