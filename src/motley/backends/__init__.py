"""Backends own buffers and kernels and know nothing of models."""

from __future__ import annotations

from motley.backends.base import (
    Backend,
    Executable,
    Footprint,
    Joint,
    LoadedWeight,
    Rendezvous,
    join,
    make_rendezvous,
)
from motley.backends.cpu import CpuBackend, ExactCpuBackend, is_available
from motley.backends.reference import ReferenceBackend
from motley.errors import ConfigError, DeviceError

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


def backend_for(device: str, name: str) -> Backend:
    """The backend that runs `device`, where the user asked for the backend `name` on the CPU."""
    if not device.startswith("cuda"):
        return get_backend(name)
    if name != "auto":
        raise ConfigError(f"backend {name!r} does not run {device}", hint="leave --backend at auto")
    try:
        from motley.backends.cuda.backend import CudaBackend  # needs Triton, which Motley runs without
    except ImportError as error:
        raise DeviceError(f"{device} needs Triton: {error}", hint="pip install triton") from error
    return CudaBackend(device)


__all__ = [
    "BACKENDS",
    "Backend",
    "CpuBackend",
    "Executable",
    "Footprint",
    "Joint",
    "LoadedWeight",
    "ReferenceBackend",
    "Rendezvous",
    "backend_for",
    "get_backend",
    "is_available",
    "join",
    "make_rendezvous",
]
