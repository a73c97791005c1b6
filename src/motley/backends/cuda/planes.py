"""Weights in the layout that the kernels read: planes of codes and of scales, repacked once at load, on the device.

Per block of 32 values of a row (values 0-15 are its low half, 16-31 its high half), in 32-bit words:

    kind   codes                                        scale                            bytes   value
    Q8_0   word j: values 4j … 4j+3, signed bytes       float16                          34      s · c
    Q4_0   word j: values 4j … in its bytes' low        float16                          18      s · (c - 8)
           nibbles, 16+4j … in their high nibbles
    Q4_K   the same                                     two float16: scale, minimum      20      s · c - m
    Q6_K   the same, and in `high` two words: bits      two float16: of the low and      28      s · (c - 32)
           2j, 2j+1 of each byte of word 0 belong to    of the high half
           values 4j … 4j+3, of word 1 to the high half
    F16, BF16: plain values, no scale.

Within a row, word j of all blocks comes before word j+1 of any (word, block): a thread loads the same word of four
neighbouring blocks at once, next to their four scales, and no value has to change threads. A K-quant's scale of a
scale is multiplied out, to float16. Rows stay rows: slices and concatenations of matrices are those of their planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from motley.errors import PlanError
from motley.formats import PackedTensor
from motley.formats.bits import join_bits, split_bits
from motley.formats.layout import SixBitPairs

BLOCK = 32  # values of a row that the kernels take together
_HALF_MAX = 65504.0


@dataclass(frozen=True, eq=False)
class WeightPlanes:
    """A matrix (n_rows, n_columns) in planes."""

    kind: str
    n_columns: int
    codes: (
        torch.Tensor
    )  # int32 (rows, words), or int16 bit patterns / float16 (rows, columns) for plain kinds
    scale: torch.Tensor | None = None  # float16 (rows, blocks), or int32 (rows, blocks): two float16
    high: torch.Tensor | None = None  # int32 (rows, 2 · blocks)

    @property
    def n_rows(self) -> int:
        return self.codes.shape[0]

    @property
    def n_bytes(self) -> int:
        parts = (self.codes, self.scale, self.high)
        return sum(part.numel() * part.itemsize for part in parts if part is not None)

    def rows(self, start: int, stop: int) -> WeightPlanes:
        """A view of some rows."""

        def cut(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part[start:stop]

        return WeightPlanes(
            self.kind, self.n_columns, self.codes[start:stop], cut(self.scale), cut(self.high)
        )


def join_rows(parts: Sequence[WeightPlanes]) -> WeightPlanes:
    """Matrices of one kind and width on top of each other, so that one launch can multiply by all of them."""
    first = parts[0]
    assert all((p.kind, p.n_columns) == (first.kind, first.n_columns) for p in parts), "unlike matrices"

    def join(pieces: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        present = [piece for piece in pieces if piece is not None]
        return torch.cat(present) if present else None

    codes = torch.cat([p.codes for p in parts])
    scale, high = join([p.scale for p in parts]), join([p.high for p in parts])
    return WeightPlanes(first.kind, first.n_columns, codes, scale, high)


PLANE_KINDS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "F16", "BF16")


def to_planes(weight: PackedTensor) -> WeightPlanes:
    """The matrix `weight` (rows, columns) in planes, on its own device. Formats without planes become BF16."""
    if len(weight.shape) != 2:
        raise PlanError(f"only matrices have planes, not {weight.shape}")
    n_rows, n_columns = weight.shape
    if weight.format.name not in PLANE_KINDS or n_columns % BLOCK or not weight.data.numel():
        return WeightPlanes("BF16", n_columns, weight.unpack().to(torch.bfloat16).view(torch.int16))
    if weight.format.name in ("F16", "BF16"):
        return WeightPlanes(weight.format.name, n_columns, weight.data.contiguous().view(torch.int16))
    blocks = weight.data.reshape(-1, weight.format.block_bytes)
    codes, scale, high = _REPACK[weight.format.name](blocks)
    return WeightPlanes(
        weight.format.name,
        n_columns,
        _by_word(codes, n_rows, n_columns // BLOCK),
        scale.reshape(n_rows, -1).contiguous(),
        None if high is None else _by_word(high, n_rows, n_columns // BLOCK),
    )


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes, scale, high; per GGUF block


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[:, 2:], _halves(blocks[:, :2]), None


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return blocks[:, 2:], _halves(blocks[:, :2]), None


def _q4_k(blocks: torch.Tensor) -> _Parts:
    scale, minimum, sub, codes = torch.split(blocks, [2, 2, 12, 128], -1)
    whole = SixBitPairs("scales", "offsets").read(sub)  # (blocks, 8) each
    scales = _halves(scale).float() * whole["scales"]
    minima = _halves(minimum).float() * whole["offsets"]
    nibbles = split_bits(codes, bits=4, width=32)  # (blocks, 256), in the order of values
    return join_bits(nibbles, bits=4, width=16), _pairs(scales, minima), None


def _q6_k(blocks: torch.Tensor) -> _Parts:
    low, upper, sub, scale = torch.split(blocks, [128, 64, 16, 2], -1)
    nibbles = split_bits(low, bits=4, width=64)
    pairs_of_bits = split_bits(upper, bits=2, width=32)
    scales = torch.unflatten(_halves(scale).float() * sub.contiguous().view(torch.int8), -1, (8, 2))
    # Runs of four values: run j of a half goes to bits 2j of its word's four bytes.
    high = join_bits(pairs_of_bits, bits=2, width=4)
    return join_bits(nibbles, bits=4, width=16), _pairs(scales[..., 0], scales[..., 1]), high


_REPACK = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q6_K": _q6_k}


def _by_word(data: torch.Tensor, n_rows: int, n_blocks: int) -> torch.Tensor:
    """Bytes in the order of blocks → int32 (rows, words · blocks)."""
    words = data.contiguous().view(torch.int32).reshape(n_rows, n_blocks, -1)
    return words.transpose(1, 2).reshape(n_rows, -1)


def _halves(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float16)


def _pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two float32 tensors as one int32 tensor of float16 pairs, the first in the low bits."""
    both = torch.stack([first, second], -1).clamp(-_HALF_MAX, _HALF_MAX).half()
    return both.contiguous().view(torch.int32).squeeze(-1)
