"""Kernels run on the CPU, under Triton's interpreter: it has to be chosen before Triton is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from launch_checks import LaunchChecks

os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    from triton.runtime import interpreter
    from triton.runtime.errors import InterpreterError
except ImportError:  # the tests skip themselves
    pass
else:
    # A scalar is an array of one value there, which NumPy 2.4 no longer takes for a whole number.
    _patch = interpreter._patch_lang_tensor

    def _patch_scalars(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_scalars

    _prepared: set[str] = set()

    def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A function that a kernel calls. Triton would prepare its language for each call, as the launch has done, or
        an earlier call of the same module (Triton's own): most of the time of kernels with many calls.
        """
        module = self.fn.__module__
        if module.startswith("triton.") and module not in _prepared:
            interpreter._patch_lang(self.fn)
            _prepared.add(module)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = _call


@pytest.fixture(autouse=True)
def checked_launches(monkeypatch: pytest.MonkeyPatch) -> LaunchChecks | None:
    """All kernels that a test launches are checked."""
    try:
        from launch_checks import install
    except ImportError:  # no Triton: nothing is launched
        return None
    return install(monkeypatch)


@pytest.fixture
def undefined_memory() -> Iterator[None]:
    """Memory that torch allocates without a value is NaN, or the largest whole number, and not by chance zero."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are recorded and compiled as on a GPU that is not there."""
    from fake_compiling import pretend_gpu

    pretend_gpu(monkeypatch)
