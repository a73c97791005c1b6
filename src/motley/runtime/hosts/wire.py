"""How activations are written on the wire: as they are, in 16 or in 8 bits.

    f32   4 bytes a value
    f16   2 bytes a value, and a power of two for each part: activations of some models are larger than a float16
    q8    34 bytes for 32 values: a float16 scale and 32 int8

Only addends of sums and hidden rows between layers are shortened; logits, ids and gathered parts travel as they are.
Every process uses what the wire holds, its own parts included, so that all of them add up the same numbers.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from motley.errors import ConfigError

WIRES = ("f32", "f16", "q8")
AUTO = "auto"  # f32 on one machine, f16 between machines
_BLOCK = 32  # values
_SCALE = struct.Struct("=f")  # of f16
_SCALE_BYTES = _SCALE.size
_ONE = np.frombuffer(_SCALE.pack(1.0), np.uint8)
_MAX_F16 = 2.0**15
_FEW = 1 << 15  # values that numpy converts in less time than torch, whose calls take longer


def choose_wire(asked: str, *, is_one_machine: bool) -> str:
    if asked not in (*WIRES, AUTO):
        raise ConfigError(f"unknown wire type {asked!r}", hint=f"there are: {AUTO}, {', '.join(WIRES)}")
    if asked != AUTO:
        return asked
    return "f32" if is_one_machine else "f16"


def is_coded(wire: str, dtype: torch.dtype) -> bool:
    """Whether values of that type are shortened, where they may be."""
    return wire != "f32" and dtype == torch.float32


def wire_bytes(wire: str, n_values: int) -> int:
    """The bytes of a part."""
    if n_values == 0:
        return 0
    if wire == "f16":
        return _SCALE_BYTES + 2 * n_values
    return -(-n_values // _BLOCK) * (2 + _BLOCK) if wire == "q8" else 4 * n_values


def encode(wire: str, values: torch.Tensor) -> torch.Tensor:
    """uint8: the bytes of a part, which is float32, contiguous and has one axis."""
    if wire == "f32" or not len(values):
        return values.view(torch.uint8)
    if wire == "f16":
        if values.is_cpu and len(values) <= _FEW and (quick := _quick_f16(values.numpy())) is not None:
            return torch.from_numpy(quick)
        _, exponent = torch.frexp(values.abs().amax() / _MAX_F16)
        one = torch.ones(1, device=values.device)
        scale = torch.ldexp(one, exponent.clamp(min=0))  # 1, unless a value is too large
        return torch.cat([scale.view(torch.uint8), (values / scale).half().view(torch.uint8)])
    blocks = torch.nn.functional.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).half()
    divisors = scales.float()
    codes = torch.where(divisors > 0, blocks / divisors, 0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], 1).flatten()


def _quick_f16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8] | None:
    """The same for f16 whose scale is 1, by numpy, whose calls take less time than torch's. None: it is another one."""
    if not max(values.max(), -values.min()) < _MAX_F16:  # also if there is a NaN
        return None
    data = np.empty(_SCALE_BYTES + 2 * len(values), np.uint8)
    data[:_SCALE_BYTES] = _ONE
    data[_SCALE_BYTES:].view(np.float16)[:] = values
    return data


def decode(wire: str, data: torch.Tensor, n_values: int) -> torch.Tensor:
    """float32 (n_values,): what `encode` has written."""
    if wire == "f32" or not n_values:
        return data.view(torch.float32)
    if wire == "f16":
        if not data.is_cpu or n_values > _FEW:
            scales = data[:_SCALE_BYTES].clone().view(torch.float32)
            return data[_SCALE_BYTES:].view(torch.float16).float() * scales
        plain: Any = data.numpy()
        (scale,) = _SCALE.unpack_from(plain)
        found = torch.from_numpy(plain[_SCALE_BYTES:].view(np.float16).astype(np.float32))
        return found if scale == 1.0 else found * scale
    blocks = data.view(-1, 2 + _BLOCK)
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    return (blocks[:, 2:].contiguous().view(torch.int8).float() * scales).flatten()[:n_values]
