"""The checks of launches find what they look for: each kernel here has one mistake."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from launch_checks import AccessError, LaunchChecks
from triton.runtime.errors import InterpreterError

from motley.backends.cuda.kernels.overlap import let_next_start, wait


@triton.jit
def _copy(x, y, n, first, size: tl.constexpr):
    i = first + tl.arange(0, size)
    tl.store(y + i, tl.load(x + i, i < n, other=0.0), i < n)


@triton.jit
def _add(x, y, n, size: tl.constexpr):
    i = tl.arange(0, size)
    tl.atomic_add(y + i, tl.load(x + i % 2), i < n, sem="relaxed")


@triton.jit
def _gather(x, ids, y, stride, size: tl.constexpr):
    i = tl.arange(0, size)
    row = tl.load(ids + i)
    tl.store(y + i, tl.load(x + row * stride, row >= 0, other=0.0))


@triton.jit
def _late(x, y, early: tl.constexpr):
    let_next_start()
    if early:
        v = tl.load(x)
        wait()
    else:
        wait()
        v = tl.load(x)
    tl.store(y, v + 1.0)


@triton.jit
def _stores_first(x, y):
    tl.store(y, 1.0)
    wait()


@triton.jit
def _waits_first(x, y):
    wait()
    let_next_start()
    tl.store(y, tl.load(x))


def test_what_is_masked_may_be_anywhere(checked_launches: LaunchChecks) -> None:
    x, y = torch.arange(20.0), torch.zeros(20)
    _copy[(1,)](x, y, 20, 0, size=32)
    assert torch.equal(x, y)
    assert (checked_launches.n_launches, checked_launches.n_checked) == (1, 40)


@pytest.mark.parametrize(
    ("sizes", "first", "message"),
    [
        ((20, 32), 0, r"_copy.*loads x\[20\].*: 4 of 24"),
        ((32, 20), 0, r"_copy.*stores y\[20\].*: 4 of 24"),
        ((32, 32), -3, r"_copy.*loads x\[-3\].*: 3 of 27"),
    ],
)
def test_elements_outside_of_tensors_are_found(
    checked_launches: LaunchChecks, sizes: tuple[int, int], first: int, message: str
) -> None:
    x, y = (torch.zeros(n) for n in sizes)
    with pytest.raises(InterpreterError, match=message):
        _copy[(1,)](x, y, 24, first, size=32)


def test_an_atomic_addition_is_a_store(checked_launches: LaunchChecks) -> None:
    with pytest.raises(InterpreterError, match=r"_add.*stores y\[8\]"):
        _add[(1,)](torch.ones(2), torch.zeros(8), 9, size=16)


def test_a_view_is_written_only_within_it(checked_launches: LaunchChecks) -> None:
    """A load may also take what lies before and after a view, in the same memory."""
    memory = torch.zeros(64)
    _copy[(1,)](memory[8:16], torch.zeros(32), 32, 0, size=32)
    with pytest.raises(InterpreterError, match=r"stores y\[8\]"):
        _copy[(1,)](torch.zeros(32), memory[8:16], 32, 0, size=32)


def test_an_element_must_be_whole(checked_launches: LaunchChecks) -> None:
    bytes_ = torch.zeros(31, dtype=torch.uint8)
    with pytest.raises(InterpreterError, match=r"loads x\[7\].*: 1 of 8"):
        _copy[(1,)](bytes_[:28].view(torch.float32), torch.zeros(8), 8, 0, size=8)


def test_offsets_that_lose_bits_are_found(checked_launches: LaunchChecks) -> None:
    """Row 3 of 2³⁰ numbers each begins at 3 · 2³⁰: with 32 bits that is a negative number. Row -1 is masked."""
    x, y = torch.zeros(8), torch.zeros(2)
    _gather[(1,)](x, torch.tensor([0, -1], dtype=torch.int32), y, 2**30, size=2)
    with pytest.raises(InterpreterError, match=r"loads x\[3221225472\].*more than 32 bits"):
        _gather[(1,)](x, torch.tensor([0, 3], dtype=torch.int32), y, 2**30, size=2)


def test_early_reads_of_what_may_still_be_written_are_found(checked_launches: LaunchChecks) -> None:
    a, b, c = (torch.zeros(1) for _ in range(3))
    _late[(1,)](a, b, early=True)  # nothing writes a
    _late[(1,)](b, c, early=False)
    with pytest.raises(
        Exception, match=r"_late reads x\[0\].*before it waits, which _late may not have written"
    ):
        _late[(1,)](b, a, early=True)  # the first may still run: the second let this one start


def test_a_kernel_that_waits_first_has_seen_the_end_of_all_before_it(checked_launches: LaunchChecks) -> None:
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    _late[(1,)](a, b, early=False)
    _waits_first[(1,)](b, c)
    _late[(1,)](b, d, early=True)
    _waits_first[(1,)](b, c)
    with pytest.raises(AccessError, match="_waits_first may not have written"):
        _late[(1,)](c, d, early=True)


def test_a_kernel_that_does_not_wait_starts_after_all_others(checked_launches: LaunchChecks) -> None:
    a, b, c = (torch.zeros(1) for _ in range(3))
    _late[(1,)](a, b, early=False)
    _copy[(1,)](b, c, 1, 0, size=1)
    _late[(1,)](b, a, early=True)
    assert (a.item(), c.item(), checked_launches.n_launches) == (2.0, 1.0, 3)


def test_stores_before_waiting_are_found(checked_launches: LaunchChecks) -> None:
    with pytest.raises(AccessError, match=r"_stores_first.*stores y\[0\].*before it waits"):
        _stores_first[(1,)](torch.zeros(1), torch.zeros(1))
