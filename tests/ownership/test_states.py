"""States and views against the element-owner oracle."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owner_oracle import one_axis_splits, owners, parts, spell

from motley.errors import SplitError
from motley.ownership import (
    MIRRORED,
    PARTIAL,
    Split,
    State,
    Word,
    concat_state,
    permute_state,
    reshape_state,
    slice_state,
    sole_owner,
)
from thorough import examples

N_DEVICES = 7
Shape = tuple[int, ...]
SplitTensor = tuple[Split, Shape]

thorough = settings(max_examples=examples(300), deadline=None)

sizes = st.sampled_from([1, 1, 2, 2, 3, 4, 6])
shapes = st.lists(sizes, min_size=1, max_size=5).map(tuple)


@st.composite
def strings(draw: st.DrawFn, length: int) -> list[int]:
    """Letters that are often repetitive, as those of flattened axes are."""
    if length == 0:
        return []
    inner = draw(st.sampled_from([k for k in range(1, length + 1) if length % k == 0]))
    outer = draw(st.sampled_from([k for k in range(1, length // inner + 1) if (length // inner) % k == 0]))
    crew = draw(st.sampled_from([1, 2, N_DEVICES]))
    core = draw(
        st.lists(
            st.integers(N_DEVICES - crew, N_DEVICES - 1),
            min_size=length // inner // outer,
            max_size=length // inner // outer,
        )
    )
    return [device for device in core for _ in range(inner)] * outer


@st.composite
def splits(draw: st.DrawFn, shape: Shape) -> Split:
    axis = draw(st.integers(0, len(shape) - 1))
    return Split(axis, spell(draw(strings(shape[axis]))))


@st.composite
def regroupings(draw: st.DrawFn, n_elements: int) -> Shape:
    """A shape of so many elements, ones included."""
    shape: list[int] = []
    while n_elements > 1:
        size = draw(st.sampled_from([k for k in range(1, n_elements + 1) if n_elements % k == 0]))
        shape.append(size)
        n_elements //= size
        if len(shape) == 5:
            break
    return (*shape, *([n_elements] if n_elements > 1 or not shape else []))


@st.composite
def split_tensors(draw: st.DrawFn) -> SplitTensor:
    shape = draw(shapes)
    return draw(splits(shape)), shape


def assert_owns(state: State, expected: np.ndarray) -> None:
    assert isinstance(state, Split)
    assert state.fits(expected.shape)
    np.testing.assert_array_equal(owners(state, expected.shape), expected)


def assert_is_local_reshape(before: Split, old: Shape, after: State, new: Shape) -> None:
    """Each device gets its part of the result by reshaping its part of the input."""
    assert isinstance(after, Split)
    values = np.arange(prod(old))
    old_parts = parts(values.reshape(old), before, N_DEVICES)
    new_parts = parts(values.reshape(new), after, N_DEVICES)
    for device, (was, now) in enumerate(zip(old_parts, new_parts, strict=True)):
        assert was.shape == before.local_shape(old, device)
        np.testing.assert_array_equal(was.reshape(after.local_shape(new, device)), now)


@thorough
@given(split_tensors(), st.data())
def test_reshape_finds_the_split_exactly_if_there_is_one(tensor: SplitTensor, data: st.DataObject) -> None:
    split, old = tensor
    new = data.draw(regroupings(prod(old)))
    expected = owners(split, old).reshape(new)
    if one_axis_splits(expected):
        after = reshape_state(split, old, new)
        assert_owns(after, expected)
        assert_is_local_reshape(split, old, after, new)
        assert reshape_state(split, old, new) == after
    else:
        with pytest.raises(SplitError, match="does not become a split of one axis"):
            reshape_state(split, old, new)


@thorough
@given(split_tensors())
def test_reshape_there_and_back_is_the_same_placement(tensor: SplitTensor) -> None:
    split, old = tensor
    flat = reshape_state(split, old, (prod(old),))
    back = reshape_state(flat, (prod(old),), old)
    assert_owns(back, owners(split, old))
    if not split.word.is_single:
        assert back == split


@thorough
@given(split_tensors())
def test_adding_and_dropping_axes_of_one_keeps_the_split(tensor: SplitTensor) -> None:
    split, shape = tensor
    wide = tuple(size for each in shape for size in (1, each))
    widened = reshape_state(split, shape, wide)
    assert_owns(widened, owners(split, shape).reshape(wide))
    assert_owns(reshape_state(widened, wide, shape), owners(split, shape))


@thorough
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), st.data())
def test_reshape_of_empty_tensors_always_answers(old: Shape, data: st.DataObject) -> None:
    old = (*old[:-1], 0)
    split = data.draw(splits(old))
    new = tuple(data.draw(st.permutations([*data.draw(st.lists(st.integers(0, 3), max_size=3)), 0])))
    after = reshape_state(split, old, new)
    assert_owns(after, np.zeros(new, dtype=np.int64))
    assert reshape_state(split, old, old) == split


@thorough
@given(split_tensors(), st.data())
def test_permute_moves_the_axis(tensor: SplitTensor, data: st.DataObject) -> None:
    split, shape = tensor
    perm = data.draw(st.permutations(range(len(shape))))
    assert_owns(permute_state(split, perm), owners(split, shape).transpose(perm))


@thorough
@given(split_tensors(), st.data())
def test_slice_takes_the_sub_word(tensor: SplitTensor, data: st.DataObject) -> None:
    split, shape = tensor
    axis = data.draw(st.integers(0, len(shape) - 1))
    a = data.draw(st.integers(0, shape[axis]))
    b = data.draw(st.integers(a, shape[axis]))
    index = (slice(None),) * axis + (slice(a, b),)
    after = slice_state(split, axis, a, b)
    assert_owns(after, owners(split, shape)[index])
    if axis == split.axis:
        values = np.arange(prod(shape)).reshape(shape)
        for device, part in enumerate(parts(values, split, N_DEVICES)):
            start, stop = split.word.local_range(device, a, b)
            local = part[(slice(None),) * axis + (slice(start, stop),)]
            np.testing.assert_array_equal(local, parts(values[index], after, N_DEVICES)[device])


@thorough
@given(st.data())
def test_concat_finds_the_split_exactly_if_there_is_one(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    axis = data.draw(st.integers(0, len(shape) - 1))
    joined_sizes = data.draw(st.lists(sizes, min_size=1, max_size=3))
    part_shapes = [(*shape[:axis], size, *shape[axis + 1 :]) for size in joined_sizes]
    shared = data.draw(splits(part_shapes[0]))  # parts that agree are rare unless they are asked for
    states = [
        shared if shared.fits(part) and data.draw(st.booleans()) else data.draw(splits(part))
        for part in part_shapes
    ]
    expected = np.concatenate(
        [owners(state, part) for state, part in zip(states, part_shapes, strict=True)], axis=axis
    )
    if one_axis_splits(expected):
        assert_owns(concat_state(states, axis, part_shapes), expected)
    else:
        with pytest.raises(SplitError, match="share no split"):
            concat_state(states, axis, part_shapes)


@thorough
@given(split_tensors(), st.data())
def test_a_split_reads_along_another_axis_only_for_a_sole_owner(
    tensor: SplitTensor, data: st.DataObject
) -> None:
    split, shape = tensor
    axis = data.draw(st.integers(0, len(shape) - 1))
    expected = owners(split, shape)
    along = split.along(axis, shape)
    if axis in one_axis_splits(expected):
        assert along is not None
        assert along.axis == axis
        assert_owns(along, expected)
    else:
        assert along is None


def test_heads_are_followed_through_a_rotation() -> None:
    heads = Split(1, Word.run((3, 0, 1)))  # (tokens, heads, dim)
    rows = reshape_state(heads, (5, 4, 128), (5 * 4 * 2, 64))
    assert str(rows) == "split[0] (0⁶ 2²)⁵"
    assert reshape_state(rows, (40, 64), (5, 4, 128)) == heads


def test_sole_owner_stays_near_its_axis() -> None:
    assert reshape_state(Split(1, Word.of(2, 32)), (7, 32), (7, 4, 8)) == Split(1, Word.of(2, 4))
    assert reshape_state(Split(1, Word.of(2, 4)), (7, 4, 8), (7, 32)) == Split(1, Word.of(2, 32))
    assert reshape_state(Split(1, Word.of(2, 32)), (1, 32), (1, 1, 4, 8)) == Split(2, Word.of(2, 4))
    assert reshape_state(Split(1, Word.of(2, 1)), (7, 1, 8), (7, 8)) == Split(1, Word.of(2, 8))
    assert sole_owner(Split(0, Word.of(2, 3))) == 2
    assert sole_owner(Split(0, Word.run((1, 1)))) is None
    assert sole_owner(MIRRORED) is None


def test_mirrored_and_partial_pass_through_views() -> None:
    for state in (MIRRORED, PARTIAL):
        assert reshape_state(state, (2, 6), (3, -1)) == state
        assert permute_state(state, (1, 0)) == state
        assert slice_state(state, 0, 1, 2) == state
        assert concat_state([state, state], 0, [(2, 6), (1, 6)]) == state
        assert state.local_shape((2, 6), 1) == (2, 6)


def test_states_are_equal_only_with_equal_axis_and_word() -> None:
    contiguous, interleaved = Split(0, Word.run((4, 4))), Split(0, Word.run((2, 2)) ** 2)
    for device in (0, 1):
        assert contiguous.local_shape((8,), device) == interleaved.local_shape((8,), device)
    assert contiguous != interleaved
    assert contiguous != Split(1, contiguous.word)
    assert len({MIRRORED, PARTIAL, contiguous, interleaved, Split(0, Word.run((4, 4)))}) == 4


def test_joining_parts_with_equal_totals_but_unequal_words_is_refused() -> None:
    contiguous, interleaved = Split(1, Word.run((4, 4))), Split(1, Word.run((2, 2)) ** 2)
    with pytest.raises(SplitError, match="share no split"):
        concat_state([contiguous, interleaved], 0, [(3, 8), (3, 8)])


def test_states_print_readably() -> None:
    assert [str(state) for state in (MIRRORED, PARTIAL)] == ["mirrored", "partial"]
    assert str(Split(1, Word.run((3, 2)) ** 4)) == "split[1] (0³ 1²)⁴"


def test_minus_one_is_worked_out() -> None:
    assert reshape_state(Split(1, Word.run((2, 4))), (5, 6), (5, -1, 2)) == Split(1, Word.run((1, 2)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: reshape_state(MIRRORED, (2, 3), (4, 2)),
        lambda: reshape_state(MIRRORED, (2, 3), (-1, 4)),
        lambda: reshape_state(MIRRORED, (2, 3), (-1, -1)),
        lambda: reshape_state(Split(0, Word.of(0, 1)), (1,), ()),
        lambda: reshape_state(Split(0, Word.run((1, 2))), (2, 3), (3, 2)),
        lambda: permute_state(MIRRORED, (0, 0)),
        lambda: permute_state(Split(2, Word.of(0, 1)), (1, 0)),
        lambda: slice_state(Split(0, Word.of(0, 3)), 0, 1, 4),
        lambda: concat_state([], 0, []),
        lambda: concat_state([MIRRORED, PARTIAL], 0, [(1,), (1,)]),
        lambda: concat_state([MIRRORED, Split(0, Word.of(0, 1))], 0, [(1,), (1,)]),
        lambda: Split(0, Word.run((1, 2))).local_shape((4,), 0),
    ],
)
def test_impossible_views_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(SplitError):
        call()
