"""`import torch` without its slowest part, for processes that are Motley's own.

torch imports the shape functions of its compiler although nothing here uses them: a fifth of the time that
`import torch` takes. `defer` puts an empty module in their place, which becomes the real one as soon as anything asks
for what is in it, or for the compiler. A program that imports Motley as a library is left alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_SHAPES = "torch._meta_registrations"  # torch imports it last, and uses nothing of it
_COMPILER = "torch._dynamo"
_TRIED = ("2.11.", "2.13.")  # versions of torch: in others, parts may need each other while they are imported


def defer() -> None:
    """Call it before anything imports torch. MOTLEY_WHOLE_TORCH=1 turns it off."""
    if "torch" not in sys.modules and os.environ.get("MOTLEY_WHOLE_TORCH", "") in ("", "0"):
        sys.meta_path.insert(0, _Finder())


class _Deferred(ModuleType):
    """A module that is imported when something of it is asked for."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # the import system, and `inspect`, which looks at all modules
            raise AttributeError(attribute)
        self.load()
        return getattr(sys.modules[self.__name__], attribute)

    def load(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        self.__dict__.update(importlib.import_module(self.__name__).__dict__)


class _Finder:
    """Finds the module once, as a deferred one; then the real one is found as always."""

    def __init__(self) -> None:
        self._is_asked = True

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == _COMPILER and isinstance(shapes := sys.modules.get(_SHAPES), _Deferred):
            shapes.load()
        if name != _SHAPES or not self._is_asked or not sys.modules["torch"].__version__.startswith(_TRIED):
            return None
        self._is_asked = False
        return ModuleSpec(name, self)  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...
