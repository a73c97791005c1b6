"""Rows of logits on their way to rank 0: only the largest values of each row, where its samplers need no others.

A row of 128,256 logits is half a megabyte, more than all other messages of a step together; forty candidates are 320
bytes. The rest of a row is -inf on rank 0, where the same candidates are found as in the whole row.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from motley.graph import Shape
from motley.runtime.best import largest
from motley.runtime.group import PartSizes
from motley.runtime.hosts.lines import MAX_BYTES

_MIN_GAIN = 4  # a shortlist is used if it has so many times fewer bytes than the row


def best_of(sizes: PartSizes, n_best: int) -> int:
    """How many values of each row travel in a collective, if its samplers need `n_best`; 0: all."""
    shapes = [shape for shape in sizes.shapes if shape is not None]
    if not n_best or not sizes.has_rows or any(len(shape) != 2 for shape in shapes):
        return 0
    is_worth_it = _MIN_GAIN * 2 * n_best <= sum(shape[1] for shape in shapes)
    is_short = 8 * sum(n_values(shape, n_best) for shape in shapes) <= MAX_BYTES
    return n_best if is_worth_it and is_short else 0


def n_values(shape: Shape, n_best: int) -> int:
    """The number of values, and of ids, of a part's shortlist."""
    return shape[0] * min(n_best, shape[1])


def shorten(part: torch.Tensor, n_best: int) -> torch.Tensor:
    """float32: the largest values of each row of a part, then their places as int32."""
    rows = part.detach().to("cpu").contiguous()
    k = min(n_best, rows.shape[1])
    if not rows.numel() or not k:
        return torch.empty(0)
    shared: np.ndarray[tuple[int, int], np.dtype[np.float32]] = np.from_dlpack(rows)  # type: ignore[assignment]
    if k == len(shared) == 1:  # one greedy request: in few calls, as each takes microseconds
        (row,) = shared
        found = np.empty(2, np.float32)
        place = row.argmax()
        found[0], found.view(np.int32)[1] = row[place], place
        return torch.from_numpy(found)
    ids = np.stack(largest(shared, k)).astype(np.int32)
    values = np.take_along_axis(shared, ids.astype(np.int64), 1)
    return torch.from_numpy(np.concatenate([values.ravel(), ids.ravel().view(np.float32)]))


def expand(data: torch.Tensor, shape: Shape) -> torch.Tensor:
    """A part from its shortlist: -inf where it says nothing. Places that the part does not have are left out."""
    whole = np.full(shape, -math.inf, np.float32)
    if len(data):
        plain = data.numpy()
        values = plain[: len(plain) // 2].reshape(shape[0], -1)
        ids = plain[len(plain) // 2 :].view(np.int32).reshape(shape[0], -1)
        for row, own, places in zip(whole, values, ids, strict=True):
            is_there = (places >= 0) & (places < shape[1])
            row[places[is_there]] = own[is_there]
    return torch.from_numpy(whole)
