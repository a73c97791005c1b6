"""Products by the library, for formats without codes and for many rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from motley.backends.cuda.kernels.rows import Rows
from motley.backends.cuda.kernels.scale_rows import scale_rows
from motley.backends.cuda.kernels.unpack import unpack_by_value
from motley.backends.cuda.planes import WeightPlanes


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


def unpacked_product(weight: WeightPlanes, x: Rows, residual: torch.Tensor | None) -> torch.Tensor:
    dense = torch.empty(weight.n_rows, weight.n_columns, dtype=torch.float16, device=x.values.device)
    unpack_by_value(weight, dense)
    return scale_rows(F.linear(x.values, dense), x.scale, residual)
