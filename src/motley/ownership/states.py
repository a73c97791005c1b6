"""States: how a tensor is distributed over devices, and how views change that.

The three states are a closed type. Each view is a pure function from state to state; if the result is
not a split of one axis, the function raises `SplitError`.

A device's part of a split tensor is dense and holds its elements in row-major order, before a view and
after it. So a reshape of the whole is, on every device, a reshape of its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from motley.errors import SplitError
from motley.ownership.words import Word

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Mirrored:
    """Every device holds all of the tensor."""

    def local_shape(self, shape: Sequence[int], device: int) -> Shape:
        """The shape of what the device holds of a tensor of this shape."""
        return tuple(shape)

    def __str__(self) -> str:
        return "mirrored"


@dataclass(frozen=True)
class Partial:
    """Every device holds an addend of the tensor's shape; the tensor is their sum."""

    def local_shape(self, shape: Sequence[int], device: int) -> Shape:
        """The shape of what the device holds of a tensor of this shape."""
        return tuple(shape)

    def __str__(self) -> str:
        return "partial"


@dataclass(frozen=True)
class Split:
    """Index i of `axis` lives on device `word.letter(i)`, and each device keeps its indices in order."""

    axis: int
    word: Word

    def __post_init__(self) -> None:
        if self.axis < 0:
            raise ValueError(f"a split counts its axis from the front, not {self.axis}")

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the word is as long as the axis of this shape."""
        return self.axis < len(shape) and len(self.word) == shape[self.axis]

    def local_shape(self, shape: Sequence[int], device: int) -> Shape:
        """The shape of what the device holds of a tensor of this shape."""
        _check_fit("local shape", self, shape)
        return _with_axis(shape, self.axis, self.word.count(device))

    def along(self, axis: int, shape: Sequence[int]) -> Split | None:
        """The same placement as a split of another axis; None unless one device owns the whole tensor."""
        _check_fit("reading along another axis", self, shape)
        if axis == self.axis:
            return self
        owner = self.word.sole_owner
        return None if owner is None else Split(axis, Word.of(owner, shape[axis]))

    def __str__(self) -> str:
        return f"split[{self.axis}] {self.word}"


State = Mirrored | Partial | Split

MIRRORED = Mirrored()
PARTIAL = Partial()


def sole_owner(state: State) -> int | None:
    """The device that holds the whole tensor alone; None if no device does."""
    return state.word.sole_owner if isinstance(state, Split) else None


def reshape_state(state: State, old_shape: Sequence[int], new_shape: Sequence[int]) -> State:
    """The state after a row-major reshape; one -1 in the new shape is computed.

    Leading and trailing axes that both shapes have in common keep their meaning. The axes between them are
    flattened, which changes the word w into (w ⊗ inner)^outer; the new axis is the one that inverts this.
    More than one axis is possible only for a sole owner: then it is the outermost axis longer than one.
    """
    old, new = tuple(old_shape), _resolve(tuple(old_shape), tuple(new_shape))
    if not isinstance(state, Split):
        return state
    _check_fit(f"reshape {old} → {new}", state, old)
    front = _n_shared(old, new)
    back = _n_shared(old[front:][::-1], new[front:][::-1])
    if state.axis < front:
        return state
    if state.axis >= len(old) - back:
        return Split(state.axis + len(new) - len(old), state.word)
    moved = _unflatten(
        Split(state.axis - front, state.word), old[front : len(old) - back], new[front : len(new) - back]
    )
    if moved is not None:
        return Split(moved.axis + front, moved.word)
    if 0 in new:  # no elements
        return Split(new.index(0), Word(()))
    if state.word.is_single and new:
        return Split(len(new) - 1, Word.of(state.word.letter(0), new[-1]))
    raise SplitError(f"reshape {old} → {new}", [state], "does not become a split of one axis")


def permute_state(state: State, perm: Sequence[int]) -> State:
    """The state after the axes are reordered: axis i of the result is axis perm[i] of the tensor."""
    if sorted(perm) != list(range(len(perm))):
        raise SplitError(f"permute {tuple(perm)}", [state], f"not an order of {len(perm)} axes")
    if not isinstance(state, Split):
        return state
    if state.axis >= len(perm):
        raise SplitError(f"permute {tuple(perm)}", [state], "the split has more axes")
    return Split(tuple(perm).index(state.axis), state.word)


def slice_state(state: State, axis: int, a: int, b: int) -> State:
    """The state of the indices [a, b) of an axis."""
    if not isinstance(state, Split) or state.axis != axis:
        return state
    if not 0 <= a <= b <= len(state.word):
        raise SplitError(f"slice [{a}, {b}) of axis {axis}", [state], f"beyond its {len(state.word)} indices")
    return Split(axis, state.word.slice(a, b))


def concat_state(states: Sequence[State], axis: int, shapes: Sequence[Sequence[int]]) -> State:
    """The state of tensors joined along an axis.

    All mirrored or all partial stays so. Split parts must have the same axis (a sole owner's part fits any
    axis), and the same word unless they are joined along this axis.
    """
    if not states or len(states) != len(shapes):
        raise SplitError("concat", states, f"{len(shapes)} shapes for {len(states)} states")
    splits = [state for state in states if isinstance(state, Split)]
    where = f"concat along axis {axis}"
    if len(splits) < len(states):
        if any(state != states[0] for state in states):
            raise SplitError(where, states, "split, partial and mirrored parts cannot be joined as they are")
        return states[0]
    for candidate in dict.fromkeys([*(split.axis for split in splits), axis]):
        words = [_word_along(split, candidate, shape) for split, shape in zip(splits, shapes, strict=True)]
        known = [word for word in words if word is not None]
        if len(known) < len(words):
            continue
        if candidate == axis:
            return Split(axis, Word.concat(known))
        if all(word == known[0] for word in known):
            return Split(candidate, known[0])
    raise SplitError(where, states, "the parts share no split of one axis")


def _word_along(split: Split, axis: int, shape: Sequence[int]) -> Word | None:
    same = split.along(axis, shape)
    return same.word if same else None


def _unflatten(split: Split, old: Shape, new: Shape) -> Split | None:
    """The split of an axis of `new` in which every element has the same owner as in `old`; None if there is none."""
    if prod(old) != prod(new) or not prod(new):
        return None
    inner = prod(old[split.axis + 1 :])
    flat = split.word.stretch(inner).power(prod(old[: split.axis]))
    for axis, size in enumerate(new):
        stride = prod(new[axis + 1 :])
        is_outside = stride >= inner * len(split.word)  # outside of the old axis's extent
        if size == 1 or (split.word.is_single and is_outside):
            continue
        repeated = flat.factor_inner(prod(new[:axis]))
        word = repeated.factor_outer(stride) if repeated is not None else None
        if word is not None:
            return Split(axis, word)
    return None


def _resolve(old: Shape, new: Shape) -> Shape:
    """The new shape with its -1 computed. Raises if the number of elements differs from the old shape's."""
    resolved = new
    if new.count(-1) == 1:
        known = prod(size for size in new if size != -1)
        if known and prod(old) % known == 0:
            resolved = _with_axis(new, new.index(-1), prod(old) // known)
    if min(resolved, default=0) < 0 or prod(resolved) != prod(old):
        raise SplitError(f"reshape {old} → {new}", [], "the shapes do not hold the same number of elements")
    return resolved


def _with_axis(shape: Sequence[int], axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _n_shared(one: Shape, other: Shape) -> int:
    """How many leading sizes two shapes have in common."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _check_fit(what: str, split: Split, shape: Sequence[int]) -> None:
    if not split.fits(shape):
        raise SplitError(what, [split], f"is no split of a tensor of shape {tuple(shape)}")
