"""Which device owns what: words, states, and what views do to them."""

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
