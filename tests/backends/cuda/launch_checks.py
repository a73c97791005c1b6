"""Checks every launch of a kernel under Triton's interpreter: what a GPU would answer with an illegal memory access, or
not at all, is an error here that names the kernel, the argument and the place.

    bounds      an element that is loaded lies in the memory of a tensor that was passed to the launch, one that is
                stored lies in the passed view of it
    overflow    an offset that was computed in 32 bits, and has lost bits there, becomes no address
    overlap     what a kernel reads before it waits (kernels/overlap) was not written by a kernel that may still run,
                and nothing is stored before

Masked lanes are not checked: their addresses may be anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from motley.backends.cuda.kernels import overlap

Addresses = npt.NDArray[np.uint64]

_SHAPING = (  # methods of the builder whose result has the values of their arguments, or is computed from them
    "create_expand_dims", "create_broadcast", "create_splat", "create_unsplat", "create_trans", "create_reshape",
    "create_join", "create_cat", "cast_impl",
)  # fmt: skip
_LOSSY = (np.add, np.subtract, np.multiply, np.left_shift)
_WIDENED = (*_LOSSY, np.fmod, np.minimum, np.maximum)


class AccessError(Exception):
    """A launch would read or write what it must not."""


@dataclass
class Launch:
    """One launch: its tensors, and what it has done so far."""

    kernel: str
    tensors: dict[str, torch.Tensor]  # by argument
    waits: bool = False  # whether a program has waited
    lets_start_early: bool = False  # whether a program has let the next kernel start before it has waited
    has_waited: bool = False  # this program
    early: list[tuple[str, Addresses]] = field(default_factory=list)  # loads before waiting, by argument
    early_stores: list[tuple[str, Addresses]] = field(default_factory=list)
    stored: list[Addresses] = field(default_factory=list)


class LaunchChecks:
    """The launches of a test, in their order."""

    def __init__(self) -> None:
        self.n_launches = self.n_checked = 0
        self._launch: Launch | None = None
        self._running: list[Launch] = []  # launches that may not have ended when the next one starts

    @contextmanager
    def launch(self, executor: GridExecutor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        given = dict(zip(executor.arg_names, args, strict=False)) | kwargs
        self._launch = Launch(executor.fn.__name__, dict(_tensors(given)))
        self.n_launches += 1
        yield
        self._end()

    def _end(self) -> None:
        """What the next launch may find running: this one; and what this one may have found, where it lets the next one
        start before it has waited. A kernel that does not wait is launched when all before it have ended.
        """
        assert self._launch is not None
        own, self._launch = self._launch, None
        if own.waits:
            self._check_early(own)
        before = self._running if own.waits and own.lets_start_early else []
        self._running = [*before, own][-64:]

    def _check_early(self, own: Launch) -> None:
        for name, addresses in own.early_stores:
            raise AccessError(f"{own.kernel} stores {_place(own, name, int(addresses[0]))} before it waits")
        for other in self._running:
            written = np.unique(np.concatenate(other.stored)) if other.stored else np.zeros(0, np.uint64)
            for name, addresses in own.early:
                if len(found := np.intersect1d(addresses, written)):
                    raise AccessError(
                        f"{own.kernel} reads {_place(own, name, int(found[0]))} before it waits, which "
                        f"{other.kernel} may not have written yet"
                    )

    def begin_program(self) -> None:
        if self._launch is not None:
            self._launch.has_waited = False

    def wait(self) -> None:
        if self._launch is not None:
            self._launch.waits = self._launch.has_waited = True

    def let_next_start(self) -> None:
        if self._launch is not None and not self._launch.has_waited:
            self._launch.lets_start_early = True

    def argument(self, tensor: torch.Tensor) -> str | None:
        """The argument of the running launch that is `tensor`, or the same view."""
        tensors = {} if self._launch is None else self._launch.tensors
        return next((name for name, own in tensors.items() if _view(own) == _view(tensor)), None)

    def check(self, kind: str, pointers: TensorHandle, mask: Any) -> None:
        own = self._launch
        if own is None:
            return
        name = pointers.attr.get("argument")
        assert name is not None, f"{own.kernel} {kind} something whose argument is not known"
        n_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        at = np.asarray(pointers.data, np.uint64)
        is_used = np.broadcast_to(np.asarray(mask, bool), at.shape)
        chosen = at[is_used]
        self.n_checked += chosen.size
        where = f"{own.kernel}, program {_program()}, {kind}"
        if "exact" in pointers.attr:
            exact = np.broadcast_to(pointers.attr["exact"].view(np.uint64), at.shape)
            if (lost := (exact != at) & is_used).any():
                place = _place(own, name, int(exact[lost][0]))
                raise AccessError(
                    f"{where} {place}: its offset has more than 32 bits, and was computed with 32"
                )
        start, stop = (_memory if kind == "loads" else _extent)(own.tensors[name])
        lacking = (chosen < start) | (chosen > max(start, stop - n_bytes)) | (stop - start < n_bytes)
        if lacking.any():
            place = _place(own, name, int(chosen[lacking][0]))
            raise AccessError(f"{where} {place}: {lacking.sum()} of {chosen.size} elements are outside")
        if kind == "loads" and not own.has_waited:
            own.early.append((name, np.unique(chosen)))
        if kind == "stores":
            own.stored.append(np.unique(chosen))
            if chosen.size and not own.has_waited:
                own.early_stores.append((name, chosen))


def _place(own: Launch, name: str, address: int) -> str:
    """An argument, and the index of an element there."""
    tensor = own.tensors[name]
    index = (address - tensor.data_ptr()) // tensor.element_size()
    return f"{name}[{index}] ({tensor.dtype}, {tuple(tensor.shape)})"


def _program() -> tuple[int, ...]:
    return tuple(int(i) for i in interpreter.interpreter_builder.grid_idx)


def _tensors(given: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in given.items():
        if isinstance(value, tuple):
            yield from _tensors({f"{name}[{i}]": each for i, each in enumerate(value)})
        elif isinstance(value, torch.Tensor):
            yield name, value


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """From the first byte of the view to its last."""
    last = sum(stride * (n - 1) for stride, n in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * (tensor.numel() > 0)


def install(patch: pytest.MonkeyPatch) -> LaunchChecks:
    """Check all launches until `patch` is undone."""
    checks = LaunchChecks()
    _watch_launches(checks, patch)
    _watch_memory(checks, patch)
    _watch_offsets(patch)
    patch.setattr(overlap, "_is_possible", lambda: True)
    patch.setattr(overlap, "gdc_wait", checks.wait)
    patch.setattr(overlap, "gdc_launch_dependents", checks.let_next_start)
    return checks


def _watch_launches(checks: LaunchChecks, patch: pytest.MonkeyPatch) -> None:
    run, begin = GridExecutor.__call__, InterpreterBuilder.set_grid_idx

    def run_checked(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        with checks.launch(self, args, kwargs):
            run(self, *args, **kwargs)

    def begin_checked(self: InterpreterBuilder, x: int, y: int, z: int) -> None:
        checks.begin_program()
        begin(self, x, y, z)

    convert = interpreter._implicit_cvt

    def convert_named(value: Any) -> Any:
        result = convert(value)
        if isinstance(value, torch.Tensor):
            result.handle.attr["argument"] = checks.argument(value)
        return result

    patch.setattr(GridExecutor, "__call__", run_checked)
    patch.setattr(interpreter, "_implicit_cvt", convert_named)
    patch.setattr(InterpreterBuilder, "set_grid_idx", begin_checked)


def _watch_memory(checks: LaunchChecks, patch: pytest.MonkeyPatch) -> None:
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    add, swap = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_atomic_cas

    def load_checked(self: Any, pointers: TensorHandle, mask: TensorHandle, *others: Any) -> Any:
        checks.check("loads", pointers, mask.data)
        return load(self, pointers, mask, *others)

    def store_checked(self: Any, pointers: TensorHandle, value: Any, mask: TensorHandle, *others: Any) -> Any:
        checks.check("stores", pointers, mask.data)
        return store(self, pointers, value, mask, *others)

    def add_checked(
        self: Any, op: Any, pointers: TensorHandle, value: Any, mask: TensorHandle, *others: Any
    ) -> Any:
        checks.check("stores", pointers, mask.data)
        return add(self, op, pointers, value, mask, *others)

    def swap_checked(self: Any, pointers: TensorHandle, *others: Any) -> Any:
        checks.check("stores", pointers, True)
        return swap(self, pointers, *others)

    patch.setattr(InterpreterBuilder, "create_masked_load", load_checked)
    patch.setattr(InterpreterBuilder, "create_masked_store", store_checked)
    patch.setattr(InterpreterBuilder, "create_atomic_rmw", add_checked)
    patch.setattr(InterpreterBuilder, "create_atomic_cas", swap_checked)


def _watch_offsets(patch: pytest.MonkeyPatch) -> None:
    """Whole numbers of 32 bits that have lost bits keep their exact values beside them (`attr`), up to the address."""
    binary, idiv = InterpreterBuilder.binary_op, InterpreterBuilder.create_idiv
    ternary, address = InterpreterBuilder.ternary_op, InterpreterBuilder.create_addptr

    def binary_checked(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        result = binary(self, lhs, rhs, op)
        known = "exact" in lhs.attr or "exact" in rhs.attr
        if lhs.dtype.scalar == tl.int32 and (op in _WIDENED if known else op in _LOSSY):
            _keep_exact(result, op(_exact(lhs), _exact(rhs)))
        return result

    def idiv_checked(self: Any, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        result = idiv(self, lhs, rhs)
        if "exact" in lhs.attr or "exact" in rhs.attr:
            a, b = _exact(lhs), _exact(rhs)
            _keep_exact(result, (a - np.fmod(a, b)) // b)
        return result

    def ternary_checked(
        self: Any, lhs: TensorHandle, rhs: TensorHandle, other: TensorHandle, op: Any
    ) -> TensorHandle:
        result = ternary(self, lhs, rhs, other, op)
        if op is np.where and ("exact" in rhs.attr or "exact" in other.attr):
            _keep_exact(result, np.where(lhs.data, _exact(rhs), _exact(other)))
        return result

    def address_checked(self: Any, pointer: TensorHandle, offset: TensorHandle) -> TensorHandle:
        result = address(self, pointer, offset)
        result.attr["argument"] = pointer.attr.get("argument")
        if "exact" in offset.attr or "exact" in pointer.attr:
            plain = TensorHandle(_exact(offset), tl.int64)
            start = TensorHandle(_exact(pointer).view(np.uint64), pointer.dtype)
            _keep_exact(result, address(self, start, plain).data.view(np.int64))
        return result

    patch.setattr(InterpreterBuilder, "binary_op", binary_checked)
    patch.setattr(InterpreterBuilder, "create_idiv", idiv_checked)
    patch.setattr(InterpreterBuilder, "ternary_op", ternary_checked)
    patch.setattr(InterpreterBuilder, "create_addptr", address_checked)
    for name in _SHAPING:
        patch.setattr(InterpreterBuilder, name, _with_exact(getattr(InterpreterBuilder, name)))


def _with_exact(method: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def shaped(self: Any, *args: Any) -> TensorHandle:
        result = method(self, *args)
        handles = [arg for arg in args if isinstance(arg, TensorHandle)]
        if "argument" in handles[0].attr:
            result.attr["argument"] = handles[0].attr["argument"]
        if any("exact" in handle.attr for handle in handles):
            wide = [
                TensorHandle(_exact(arg), tl.int64) if isinstance(arg, TensorHandle) else arg for arg in args
            ]
            _keep_exact(result, method(self, *wide).data)
        return result

    return shaped


def _exact(handle: TensorHandle) -> npt.NDArray[np.int64]:
    """Of a pointer its bits."""
    if "exact" in handle.attr:
        found: npt.NDArray[np.int64] = handle.attr["exact"]
        return found
    data = handle.data
    return data.view(np.int64) if data.dtype == np.uint64 else data.astype(np.int64)


def _keep_exact(handle: TensorHandle, exact: npt.NDArray[np.int64]) -> None:
    if handle.data.dtype.kind in "iu" and not np.array_equal(_exact(handle), exact):
        handle.attr["exact"] = exact
