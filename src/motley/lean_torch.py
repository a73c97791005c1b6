"""`import torch` without its slowest parts, for processes that are Motley's own.

torch imports a thousand modules; a third of them (the shape functions of its compiler, export, optimizers,
distributions, quantization, …) are used by nothing here. `defer` puts empty modules in their place. As soon as anything
asks for what is in one of them, or for the compiler, all of them become the real ones, in the order in which torch
imports them. A program that imports Motley as a library is left alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_UNUSED = {  # torch imports them and uses nothing of them while it is imported
    "torch._meta_registrations",
    "torch.ao",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.utils.data",
    "pynvml",  # no part of torch
}
_COMPILER = "torch._dynamo"
_TRIED = ("2.11.", "2.13.")  # versions of torch: in others, parts may need each other while they are imported


def defer() -> None:
    """Call it before anything imports torch. MOTLEY_WHOLE_TORCH=1 turns it off."""
    if "torch" not in sys.modules and os.environ.get("MOTLEY_WHOLE_TORCH", "") in ("", "0"):
        sys.meta_path.insert(0, _Finder())


class _Deferred(ModuleType):
    """A module that is imported when an attribute of it is used."""

    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self.__finder = finder

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # the import system, and `inspect`, which looks at all modules
            raise AttributeError(attribute)
        self.__finder.load_all()
        _load(self)
        return getattr(sys.modules[self.__name__], attribute)


def _load(module: _Deferred) -> None:
    """No method: the module's own names come before those of its class."""
    name = module.__name__
    if sys.modules.get(name) is module:
        del sys.modules[name]
    module.__dict__.update(importlib.import_module(name).__dict__)


class _Finder:
    """Finds each unused module once, as a deferred one; then the real one is found as always."""

    def __init__(self) -> None:
        self._left = set(_UNUSED)
        self._deferred: list[str] = []  # in the order in which torch imports them

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = name.rpartition(".")[0]
        if name == _COMPILER:
            self.load_all()
        elif isinstance(sys.modules.get(parent), _Deferred):
            self.load_all()
            return PathFinder.find_spec(name, sys.modules[parent].__path__)
        if name not in self._left or not _is_tried() or PathFinder.find_spec(name, path) is None:
            return None
        self._left.discard(name)
        self._deferred.append(name)
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # a loader by its methods

    def load_all(self) -> None:
        """Import what was deferred, and defer nothing any more."""
        self._left.clear()
        while self._deferred:
            module = sys.modules.get(self._deferred.pop(0))
            if isinstance(module, _Deferred):
                _load(module)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name, self)

    def exec_module(self, module: ModuleType) -> None: ...


def _is_tried() -> bool:
    """Whether torch is being imported, in a version for which the list is known to be right."""
    version: str = getattr(sys.modules.get("torch"), "__version__", "")
    return version.startswith(_TRIED)
