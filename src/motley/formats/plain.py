"""Plain numbers: one value is one block."""

from __future__ import annotations

import torch
from torch import Tensor

from motley.formats.packed import Format


def _format(name: str, dtype: torch.dtype) -> Format:
    def unpack(data: Tensor) -> Tensor:
        return data.contiguous().view(dtype).float()

    def pack(values: Tensor) -> Tensor:
        return values.to(dtype).view(torch.uint8)

    return Format(name, block_size=1, block_bytes=dtype.itemsize, unpack_blocks=unpack, pack_blocks=pack)


PLAIN_FORMATS = (
    _format("F32", torch.float32),
    _format("F16", torch.float16),
    _format("BF16", torch.bfloat16),
)
