"""Kernels run on the CPU, under Triton's interpreter: it has to be chosen before Triton is imported."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    from triton.runtime import interpreter
except ImportError:  # the tests skip themselves
    pass
else:
    # A scalar is an array of one value there, which NumPy 2.4 no longer takes for a whole number.
    _patch = interpreter._patch_lang_tensor

    def _patch_scalars(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_scalars
