"""NCCL between the GPUs of a crew: activations go from GPU to GPU, without copies in the memory of the hosts.

Every device is a rank of its own, so that a process may have several. A collective is one all-gather, of parts that are
padded to the same length; CollectiveKernel adds them in the order of devices, as over all other lines. NCCL's own
all-reduce has another order, and other bits. A device waits for each message on the host, where it notices a lost peer.

This was never run on several GPUs. Tests use Gloo instead of NCCL, by the same calls on tensors of the CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from motley.errors import DeviceError
from motley.graph import Shape
from motley.runtime.group import PartSizes
from motley.runtime.hosts.gloo import ControlStore, Lookup, Publish
from motley.runtime.hosts.lines import LineClosedError
from motley.runtime.hosts.wire import decode, encode, is_coded, wire_bytes

_MAX_WAIT = timedelta(days=1)  # a lost process is found by the control connection, which then calls `abort`
_KEY = "motley/nccl"
_ON = "1"  # the value of MOTLEY_NCCL, in rank 0's environment, that turns NCCL on. Off by default: it is untried


class NcclLines:
    """The ranks of one process. Each device's thread calls the methods for its device."""

    def __init__(
        self, groups: Mapping[int, Any], places: Mapping[int, torch.device], wire: str, store: Any = None
    ) -> None:
        """By device of this process: its torch.distributed process group, in which devices are ranks, and its GPU.
        `store`: that of the groups.
        """
        self._groups, self._places = dict(groups), dict(places)
        self._wire = wire
        # torch does not keep the Python object of its store, which it needs for the first message of two ranks.
        self._store = store
        self._is_aborted = False

    def exchange(self, device: int, part: torch.Tensor | None, sizes: PartSizes) -> list[torch.Tensor | None]:
        """The parts of all devices on this device; empty if another device is the only reader."""
        wire = self._wire if sizes.is_sum and is_coded(self._wire, sizes.dtype) else None
        counts = [0 if shape is None else _n_items(wire, shape) for shape in sizes.shapes]
        own = self._encode(device, part, sizes.dtype, wire)
        if sizes.reader is None:
            rows = dict(enumerate(self._gather(device, own, len(counts), max(counts))))
        elif sizes.reader == device:
            others = [other for other, n in enumerate(counts) if n and other != device]
            rows = {device: own} | {o: self._receive(device, o, own.new_empty(counts[o])) for o in others}
        else:
            if counts[device]:
                self._send(device, own, sizes.reader)
            return []
        found: list[torch.Tensor | None] = [None] * len(counts)
        for other, shape in enumerate(sizes.shapes):
            if shape is not None:
                data = rows[other][: counts[other]] if counts[other] else own.new_empty(0)
                found[other] = _decode(wire, data, shape)
        return found

    def send(self, tensor: torch.Tensor, source: int, target: int) -> None:
        wire = self._wire if is_coded(self._wire, tensor.dtype) else None
        data = self._encode(source, tensor, tensor.dtype, wire)
        if data.numel():
            self._send(source, data, target)

    def receive(self, source: int, target: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        wire = self._wire if is_coded(self._wire, dtype) else None
        kind = torch.uint8 if wire else dtype
        data = torch.empty(_n_items(wire, shape), dtype=kind, device=self._places[target])
        return _decode(wire, self._receive(target, source, data) if data.numel() else data, shape)

    def abort(self) -> None:
        """Makes messages fail, those that wait included. May be called by any thread."""
        self._is_aborted = True
        for group in self._groups.values():
            with suppress(RuntimeError):  # it was aborted before
                group.abort()

    def close(self) -> None:
        self.abort()
        self._groups = {}

    def _encode(
        self, device: int, part: torch.Tensor | None, dtype: torch.dtype, wire: str | None
    ) -> torch.Tensor:
        if part is None:
            return torch.empty(0, dtype=torch.uint8 if wire else dtype, device=self._places[device])
        flat = part.detach().to(self._places[device], dtype).flatten()
        return encode(wire, flat) if wire else flat

    def _gather(self, device: int, own: torch.Tensor, n_ranks: int, longest: int) -> torch.Tensor:
        """(ranks, longest): the values of all devices."""
        rows = own.new_empty(n_ranks, longest)
        if longest:
            padded = torch.nn.functional.pad(own, (0, longest - len(own)))
            self._finish(device, lambda group: group._allgather_base(rows.view(-1), padded))
        return rows

    def _send(self, device: int, data: torch.Tensor, target: int) -> None:
        self._finish(device, lambda group: group.send([data], target, 0))

    def _receive(self, device: int, source: int, data: torch.Tensor) -> torch.Tensor:
        self._finish(device, lambda group: group.recv([data], source, 0))
        return data

    def _finish(self, device: int, begin: Callable[[Any], Any]) -> None:
        """Runs an operation to its end. The GPU's results of an aborted one are worthless, so the host waits for it."""
        place = self._places[device]
        try:
            begin(self._groups[device]).wait(_MAX_WAIT)
            if place.type == "cuda":
                torch.cuda.current_stream(place).synchronize()
        except (RuntimeError, KeyError) as error:  # KeyError: closed by another thread
            raise LineClosedError(str(error)) from error
        if self._is_aborted:
            raise LineClosedError("aborted")


def open_nccl(
    rank: int,
    owners: Sequence[int],
    devices: Sequence[str],
    wire: str,
    publish: Publish,
    lookup: Lookup,
) -> NcclLines | None:
    """Lines between the GPUs of a crew, if rank 0's environment asks for them (MOTLEY_NCCL=1); a DeviceError there if a
    device is not a GPU of its own. All processes call this at the same time.
    """
    is_asked_for = rank == 0 and os.environ.get("MOTLEY_NCCL", "") == _ON
    own = [device for device, owner in enumerate(owners) if owner == rank]
    lacking = "not all devices are GPUs"
    if are_gpus(devices):  # all processes know this, so all of them publish, or none
        gpus = _gpu_ids([devices[device] for device in own]) if rank or is_asked_for else []
        publish(f"{_KEY}/{rank}", "\n".join(gpus).encode())
        others = [lookup(f"{_KEY}/{other}").decode().splitlines() for other in sorted(set(owners) - {rank})]
        all_gpus = [*gpus, *(gpu for each in others for gpu in each)]
        if len(all_gpus) == len(set(all_gpus)) == len(devices):
            places = {device: place_of(devices[device]) for device in own}
            store = ControlStore(publish, lookup)
            return NcclLines(_connect(store, places, len(devices)), places, wire, store)
        lacking = "NCCL is not available in all processes, or two devices are the same GPU"
    if is_asked_for:
        raise DeviceError(f"MOTLEY_NCCL=1, but {lacking}", hint="leave it out: there are other lines")
    return None


def are_gpus(devices: Sequence[str]) -> bool:
    return bool(devices) and all(name.startswith("cuda") for name in devices)


def place_of(name: str) -> torch.device:
    return torch.device(name)


def make_group(store: Any, rank: int, n_ranks: int, place: torch.device) -> Any:
    """A process group of NCCL, connected. All ranks call this at the same time."""
    # Otherwise torch ends this process when another one is lost, and a worker has to survive that.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _MAX_WAIT
    with torch.cuda.device(place):
        group = nccl(store, rank, n_ranks, options)
        group.eager_connect_single_device(place)
    return group


def _connect(store: ControlStore, places: Mapping[int, torch.device], n_ranks: int) -> dict[int, Any]:
    """The process group of each device of this process. NCCL connects all ranks at once: each in a thread."""
    within = dist.PrefixStore(_KEY, store)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(len(places)) as pool:
        made = {d: pool.submit(make_group, within, d, n_ranks, place) for d, place in places.items()}
    try:
        return {device: group.result() for device, group in made.items()}
    except RuntimeError as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DeviceError(
            f"NCCL cannot connect the GPUs of the crew: {first}",
            hint="without MOTLEY_NCCL=1, activations go through the memory of the hosts",
        ) from error


def _gpu_ids(names: Sequence[str]) -> list[str]:
    """An identity for each of these GPUs of this process: two names may be one GPU. Empty: NCCL cannot be used."""
    if not dist.is_available() or not dist.is_nccl_available():
        return []
    return [str(torch.cuda.get_device_properties(name).uuid) for name in names]


def _n_items(wire: str | None, shape: Shape) -> int:
    n_values = math.prod(shape)
    return wire_bytes(wire, n_values) if wire else n_values


def _decode(wire: str | None, data: torch.Tensor, shape: Shape) -> torch.Tensor:
    return (decode(wire, data.clone(), math.prod(shape)) if wire else data).view(shape)
