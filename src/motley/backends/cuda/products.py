"""Products by the library, for formats without codes and for many rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from motley.backends.cuda.compiling import is_recording
from motley.backends.cuda.kernels.rows import Rows
from motley.backends.cuda.kernels.scale_rows import scale_rows
from motley.backends.cuda.kernels.unpack import unpack_by_value
from motley.backends.cuda.library_attention import is_on_hopper, load_cudnn
from motley.backends.cuda.planes import WeightPlanes
from motley.backends.cuda.support import MAX_KERNEL_ROWS, MIN_PIECE_ROWS


def joint_halves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """The memory (rows, 2 n) of which a and b (rows, n) are the two halves, if it is so."""
    n = a.shape[1]
    is_joint = (
        a.stride() == b.stride() == (2 * n, 1)
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and b.storage_offset() == a.storage_offset() + n
    )
    return a.as_strided((a.shape[0], 2 * n), (2 * n, 1), a.storage_offset()) if is_joint else None


_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def plain_values(weight: WeightPlanes) -> torch.Tensor:
    """Planes of plain kinds are bit patterns."""
    return weight.codes.view(_PLAIN_TYPES[weight.kind])


def library_product(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    if not x.shape[1]:  # nothing of it is on this device
        return torch.zeros(len(x), len(weight), device=x.device) if residual is None else residual.clone()
    if weight.dtype == torch.float32:
        out = F.linear(x, weight)
        return out if residual is None else out + residual
    largest = x.abs().amax(1, keepdim=True).clamp(min=1e-30)  # so that float16 does not overflow
    out = F.linear((x / largest).to(weight.dtype), weight).float() * largest
    return out if residual is None else out + residual


def unpacked_product(
    dense: torch.Tensor, x: Rows, out: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """`dense`: a matrix as `unpacked` gives it. `out` is written to if all rows have one scale, and then returned."""
    if not x.fixed:
        return scale_rows(F.linear(x.values, dense), x.scale, residual)
    if not dense.is_cuda:  # where kernels are interpreted: the library has float32 results on GPUs only
        product = F.linear(x.values, dense).float() * x.fixed
        return product if residual is None else product + residual
    added, beta = (out, 0.0) if residual is None else (residual, 1.0)
    return torch.addmm(added, x.values, dense.T, torch.float32, beta=beta, alpha=x.fixed, out=out)


def unpacked(weight: WeightPlanes) -> torch.Tensor:
    """The matrix as float16 (rows, columns), columns by value."""
    dense = torch.empty(weight.n_rows, weight.n_columns, dtype=torch.float16, device=weight.codes.device)
    return unpack_by_value(weight, dense)


def load_library(device: torch.device, n_rows: int, shapes: Iterable[tuple[int, int]]) -> None:
    """Multiply `n_rows` by matrices of some shapes: the library's first product loads it, which takes half a second.
    On Hopper, cuDNN is loaded, too.

    Few rows are multiplied by our own kernels, and need no library.
    """
    if n_rows <= MAX_KERNEL_ROWS:
        return
    with torch.inference_mode(), torch.cuda.device(device):
        # Makes the GPU's context current in this thread. Neither the line above nor memory that the allocator has at
        # hand does, and the library warns if it has to do it.
        torch.cuda.mem_get_info(device)
        for shape in shapes:
            x = torch.empty(n_rows, shape[1], dtype=torch.float16, device=device)
            F.linear(x, torch.empty(shape, dtype=torch.float16, device=device))
    if n_rows >= MIN_PIECE_ROWS and is_on_hopper(device):
        load_cudnn(device)


class Copies:
    """Float16 copies of packed matrices, where memory is spare. A batch of many rows then unpacks nothing; one of 128
    rows is bound by memory, and no longer by the arithmetic that unpacks.
    """

    def __init__(self) -> None:
        self.is_kept = False
        self._copies: dict[WeightPlanes, torch.Tensor] = {}

    def get(self, weight: WeightPlanes) -> torch.Tensor | None:
        """The matrix's copy, made at the first use; None: there are none."""
        if not self.is_kept or weight in self._copies:
            return self._copies.get(weight)
        try:
            dense = unpacked(weight)
        except torch.OutOfMemoryError:  # another process has taken the memory since
            self.is_kept = False
            return None
        is_capturing = weight.codes.is_cuda and torch.cuda.is_current_stream_capturing()
        if not is_recording() and not is_capturing:  # otherwise the kernel has not run
            self._copies[weight] = dense
        return dense
