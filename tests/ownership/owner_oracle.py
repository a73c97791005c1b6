"""The element-owner oracle: an integer array of the tensor's shape that says who owns each element.

It knows nothing of words but how to read one out, letter by letter, and nothing of the algebra.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from motley.ownership import Split, Word

Owners = npt.NDArray[np.int64]


def letters(word: Word) -> list[int]:
    """The word written out."""
    return [device for device, n in word.runs() for _ in range(n)]


def spell(string: Sequence[int]) -> Word:
    """A word made letter by letter."""
    return Word.concat(Word.of(device, 1) for device in string)


def owners(split: Split, shape: Sequence[int]) -> Owners:
    """The owner of each element of a tensor of this shape."""
    along = np.array(letters(split.word), dtype=np.int64)
    along = along.reshape([-1 if axis == split.axis else 1 for axis in range(len(shape))])
    return np.broadcast_to(along, tuple(shape)).copy()


def one_axis_splits(owner: Owners) -> dict[int, list[int]]:
    """Every axis along which alone the owner changes, with its letters."""
    found = {}
    for axis in range(owner.ndim):
        lines = np.moveaxis(owner, axis, -1).reshape(-1, owner.shape[axis])
        if (lines == lines[:1]).all():
            found[axis] = lines[0].tolist()
    return found


def parts(values: npt.NDArray[np.int64], split: Split, n_devices: int) -> list[npt.NDArray[np.int64]]:
    """What each device holds of a tensor."""
    along = np.array(letters(split.word), dtype=np.int64)
    return [np.compress(along == device, values, axis=split.axis) for device in range(n_devices)]
