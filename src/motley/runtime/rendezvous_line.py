"""The communicator of a device beside native programs, such as a GPU beside a CPU (`cuda:0,cpu`).

Native programs do their collectives at a rendezvous, without Python. A device on other hardware takes part there by its
thread, with copies in pinned memory, which is allocated once for each device. A thread that waits there spins for some
milliseconds without Python's lock before it sleeps: waking a thread can take longer than a layer.

In a crew of two, small batches do without the thread: the device has messages of its own (runtime.messages).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from motley.backends import DeviceMessages, HostRendezvous
from motley.graph import Shape
from motley.runtime.group import PartSizes


class RendezvousLine:
    """One device's communicator (group.Communicator) at a rendezvous of all devices of this process."""

    reader = 0

    def __init__(
        self,
        rendezvous: HostRendezvous,
        device: int,
        n_devices: int,
        place: torch.device,
        messages: DeviceMessages | None = None,
        n_message_values: int = 0,
    ) -> None:
        """`place`: where the device's tensors are. `messages`: of this device, if it is no native program.
        `n_message_values`: that fit, on both sides.
        """
        self.messages = messages
        self.n_message_values = n_message_values
        self._rendezvous = rendezvous
        self.rendezvous = rendezvous, device
        self.device = device
        self.n_devices = n_devices
        self._outgoing = _Staging(place)
        self._incoming = [_Staging(place) for _ in range(n_devices)]  # by source
        self._stream = _Stream(place)

    def exchange(self, part: torch.Tensor | None, sizes: PartSizes) -> Sequence[torch.Tensor | None]:
        members = sizes.members or tuple(range(self.n_devices))
        is_read = sizes.reader in (None, self.device)
        others = {}
        if is_read:
            for member in members:
                shape = sizes.shapes[member]
                if member != self.device and shape is not None:
                    others[member] = self._room(member, shape, sizes.dtype)
        # What no other device reads is not copied to the host: the logits of a GPU that has the output matrix.
        is_sent = part is not None and sizes.reader != self.device
        here = None if part is None else self._on_host(part, is_copied=is_sent)
        self._rendezvous.exchange(sizes.members, self.device, here, others)
        if not is_read:
            return ()
        return [part if device == self.device else others.get(device) for device in range(self.n_devices)]

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self._rendezvous.send(self.device, target, self._on_host(tensor))

    def receive(self, source: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        room = self._room(source, shape, dtype)
        self._rendezvous.receive(source, self.device, room)
        return room

    def _on_host(self, tensor: torch.Tensor, *, is_copied: bool = True) -> torch.Tensor:
        """The tensor in the host's memory, once the device has computed it. `is_copied` False: only memory for it."""
        if not self._stream.is_gpu:
            return tensor.contiguous()
        room = self._outgoing.room(tuple(tensor.shape), tensor.dtype)
        if is_copied:
            room.copy_(tensor, non_blocking=True)
            self._finish_copies()
        return room

    def _room(self, source: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Memory for what comes from a device. The GPU may still be copying what was there before."""
        staging = self._incoming[source]
        if staging.is_in_use:
            self._finish_copies()
        staging.is_in_use = self._stream.is_gpu
        return staging.room(shape, dtype)

    def _finish_copies(self) -> None:
        """Waits for the device, which then has also read all that came before."""
        self._stream.synchronize()
        for staging in self._incoming:
            staging.is_in_use = False


class _Staging:
    """Memory of the host that grows to the largest tensor; pinned for a GPU."""

    def __init__(self, place: torch.device) -> None:
        self._is_pinned = place.type == "cuda"
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.is_in_use = False  # by copies that a GPU has not finished

    def room(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        n_bytes = prod(shape) * dtype.itemsize
        if n_bytes > self._bytes.numel():
            self._bytes = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        return self._bytes[:n_bytes].view(dtype).view(shape)


class _Stream:
    """Waits for a GPU by an event: the thread spins, without Python's lock."""

    def __init__(self, place: torch.device) -> None:
        self.is_gpu = place.type == "cuda"
        self._event: torch.cuda.Event | None = None

    def synchronize(self) -> None:
        if not self.is_gpu:
            return
        if self._event is None:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()
        self._event.synchronize()
