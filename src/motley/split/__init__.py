"""How tensors are spread over unequal devices: ownership words, and the states built on them."""

from motley.split.states import (
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
from motley.split.words import Word

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
