"""A stand-in for torch, for processes that import kernels in order to compile them: torch takes seconds to import, and
only launches need it.
"""

from __future__ import annotations

import sys
from types import ModuleType


class _Absent(ModuleType):
    """Stands in for torch and for everything in it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *_: object, **__: object) -> _Absent:
        return self

    def __getitem__(self, _: object) -> _Absent:
        return self

    def __or__(self, _: object) -> _Absent:
        return self

    __ror__ = __or__


def stand_in() -> None:
    """Make `import torch` give a stand-in in this process. Call it before anything imports torch."""
    for name in ("torch", "torch.nn", "torch.nn.functional"):
        sys.modules.setdefault(name, _Absent(name))
