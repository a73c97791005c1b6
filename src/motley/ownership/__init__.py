"""Ownership of tensor parts by devices: ownership words, the states built on them, and the effect of views on both."""

from motley.ownership.states import (
    MIRRORED,
    PARTIAL,
    Mirrored,
    Partial,
    Split,
    State,
    concat_state,
    permute_state,
    reshape_state,
    slice_state,
    sole_owner,
)
from motley.ownership.words import Word

__all__ = [
    "MIRRORED",
    "PARTIAL",
    "Mirrored",
    "Partial",
    "Split",
    "State",
    "Word",
    "concat_state",
    "permute_state",
    "reshape_state",
    "slice_state",
    "sole_owner",
]
