"""A GPU's messages with a native program of the CPU (base.DeviceMessages), in pinned memory."""

from __future__ import annotations

import torch

from motley.backends.cuda.kernels import tagged
from motley.errors import DeviceError

N_VALUES = 5 << 20  # in each direction: 16 rows of an 8B model's layers
_N_LINE = 32  # words of 4 bytes, apart from all others


class PinnedMessages:
    def __init__(self, device: torch.device, n_values: int = N_VALUES, *, is_stand_in: bool = False) -> None:
        """`is_stand_in`: kernels are only recorded. Then nothing is pinned, and the system gives no memory."""
        self.n_values = n_values
        self.aborted_error: type[Exception] = DeviceError
        self._device = device
        is_pinned = device.type == "cuda" and not is_stand_in
        make = torch.empty if is_stand_in else torch.zeros  # pages that are not written take no memory
        self._sent, self._heard = (make(n_values, dtype=torch.int64, pin_memory=is_pinned) for _ in range(2))
        self._aborted = torch.zeros(_N_LINE, dtype=torch.int32, pin_memory=is_pinned)
        self._tag = torch.zeros(1, dtype=torch.int32, device=device)
        self._done: torch.cuda.Event | None = None

    @property
    def addresses(self) -> tuple[int, int, int]:
        return self._sent.data_ptr(), self._heard.data_ptr(), self._aborted.data_ptr()

    def advance(self) -> None:
        tagged.advance(self._tag)

    def post(self, x: torch.Tensor, place: int) -> None:
        tagged.post(x.contiguous(), self._sent[place : place + x.numel()], self._tag)

    def fetch(self, place: int, out: torch.Tensor, own: torch.Tensor | None = None) -> None:
        words = self._heard[place : place + out.numel()]
        tagged.fetch(words, out, self._tag, self._aborted, None if own is None else own.contiguous())

    def finish(self) -> None:
        if self._device.type == "cuda":
            if self._done is None:
                self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()
            self._done.synchronize()  # spins, without Python's lock
        if int(self._aborted[0]):
            raise self.aborted_error("another device has failed")

    def reset(self, tag: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels that still wait have been told to stop
        self._tag.fill_(tag)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the next run may be on another stream
