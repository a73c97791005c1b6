"""Upload from the mapped file to the GPU through pinned memory, part by part, so that reading and copying overlap.

A copy from pageable memory is slow: the driver copies it through its own buffer on one core, with a page fault for
each page of the file. Here all of a device's threads read a part of the file into one pinned buffer while the GPU
copies the previous part from the other buffer and repacks the parts that it already has.
"""

from __future__ import annotations

import torch

_PART = 32 << 20  # bytes of a buffer; there are two
_SMALL = 1 << 20  # bytes below which a plain copy is used


class Uploader:
    """Copies tensors to one device. Not thread-safe."""

    def __init__(self, device: torch.device, n_bytes: int = _PART) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._n_bytes = n_bytes
        self._buffers: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def upload(self, data: torch.Tensor) -> torch.Tensor:
        """`data` on the device. It may be a view with any strides; the caller may free it after this returns."""
        n_bytes = data.numel() * data.itemsize
        if data.device == self._device and self._is_gpu:
            return data
        if n_bytes < min(_SMALL, self._n_bytes) or data.dim() < 2 or not self._fits_a_row(data):
            return data.to(self._device)
        out = torch.empty(data.shape, dtype=data.dtype, device=self._device)
        n_rows = max(1, self._n_bytes // (n_bytes // data.shape[0]))
        for start in range(0, data.shape[0], n_rows):
            part = data[start : start + n_rows]
            self._copy(part, out[start : start + n_rows])
        return out

    def finish(self) -> None:
        """Wait for all copies and free the pinned memory."""
        for event in self._copied:
            if event is not None:
                event.synchronize()
        self._buffers, self._copied = [], [None, None]

    def _fits_a_row(self, data: torch.Tensor) -> bool:
        return data[0].numel() * data.itemsize <= self._n_bytes

    def _copy(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a part to `out`: read it into one buffer while the device copies the previous part from the other."""
        if not self._buffers:
            self._buffers = [
                torch.empty(self._n_bytes, dtype=torch.uint8, pin_memory=self._is_gpu) for _ in range(2)
            ]
        self._turn = 1 - self._turn
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()  # the device has copied this buffer's previous content
        buffer = self._buffers[self._turn][: part.numel() * part.itemsize].view(part.dtype).view(part.shape)
        buffer.copy_(part)  # multi-threaded
        out.copy_(buffer, non_blocking=True)
        if self._is_gpu:
            if event is None:
                event = self._copied[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
