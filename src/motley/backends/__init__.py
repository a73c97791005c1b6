"""Backends own buffers and kernels and know nothing of models."""

from __future__ import annotations

from motley.backends.base import Backend, Executable
from motley.backends.cpu import CpuBackend, ExactCpuBackend, is_available
from motley.backends.reference import ReferenceBackend
from motley.errors import ConfigError

BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend for backend in (CpuBackend, ExactCpuBackend, ReferenceBackend)
}


def get_backend(name: str) -> Backend:
    """The backend called `name`; "auto" is the fastest that this machine can run."""
    if name == "auto":
        return CpuBackend() if is_available() else ReferenceBackend()
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}", hint=f"there are: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]()


__all__ = ["BACKENDS", "Backend", "CpuBackend", "Executable", "ReferenceBackend", "get_backend"]
