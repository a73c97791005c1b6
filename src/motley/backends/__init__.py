"""Backends own buffers and kernels and know nothing of models."""

from __future__ import annotations

from collections.abc import Sequence

from motley.backends.base import (
    Backend,
    BatchInputs,
    DeviceMessages,
    DeviceOffer,
    DraftingJoint,
    Executable,
    Footprint,
    HostRendezvous,
    Joint,
    LoadedWeight,
    MessagePlaces,
    Rendezvous,
    SteadyProgram,
    join,
    make_rendezvous,
)
from motley.backends.cpu import (
    NONE_LEFT,
    CpuBackend,
    ExactCpuBackend,
    SharedGroup,
    choose_rows,
    instruction_sets,
    is_available,
    look_up,
    new_text_index,
    row_settings,
)
from motley.backends.cuda.planning import RemoteGpu
from motley.backends.reference import ReferenceBackend
from motley.errors import ConfigError, DeviceError

BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend for backend in (CpuBackend, ExactCpuBackend, ReferenceBackend)
}


def have_native_collectives(names: Sequence[str]) -> bool:
    """Whether devices with these backends can do collectives at one rendezvous, without Python."""
    kinds = {BACKENDS.get(name) for name in names}
    return len(kinds) == 1 and all(kind is not None and kind.has_native_collectives for kind in kinds)


def get_backend(name: str) -> Backend:
    """The backend called `name`; "auto" is the fastest that this machine can run."""
    if name == "auto":
        return CpuBackend() if is_available() else ReferenceBackend()
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}", hint=f"there are: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]()


def backend_for(device: str, name: str, offer: DeviceOffer | None = None) -> Backend:
    """The backend that runs `device`, where the user asked for the backend `name` on the CPU.

    `offer`: what the worker says of a device of another process. A GPU is then planned here, and runs there.
    """
    if not device.startswith("cuda"):
        return get_backend(name)
    if name != "auto":
        raise ConfigError(
            f"backend {name!r} does not run {device}", hint="leave out --backend, or use --backend auto"
        )
    if offer is not None:
        return RemoteGpu(device, offer)
    try:
        from motley.backends.cuda.backend import CudaBackend  # needs Triton, which Motley runs without
    except ImportError as error:
        raise DeviceError(f"{device} needs Triton: {error}", hint="pip install triton") from error
    return CudaBackend(device)


def backend_for_heads(
    device: str, name: str, head_dim: int, group: int, offer: DeviceOffer | None = None
) -> tuple[Backend, str | None]:
    """The backend that runs `device` (see `backend_for`) for heads of `head_dim`, `group` of them for each KV head.

    If the native kernels cannot do it, "auto" means the reference, with a sentence about it; another backend that
    cannot is a ConfigError.
    """
    backend = backend_for(device, name, offer)
    reason = backend.refuses_heads(head_dim, group)
    if reason is None:
        return backend, None
    if name == "auto" and not device.startswith("cuda"):
        return ReferenceBackend(), f"{device} runs on --backend reference, which is slow: {reason}"
    raise ConfigError(f"{device}: {reason}", hint="--backend reference runs it, slowly")


__all__ = [
    "BACKENDS",
    "NONE_LEFT",
    "Backend",
    "BatchInputs",
    "CpuBackend",
    "DeviceMessages",
    "DeviceOffer",
    "DraftingJoint",
    "Executable",
    "Footprint",
    "HostRendezvous",
    "Joint",
    "LoadedWeight",
    "MessagePlaces",
    "ReferenceBackend",
    "Rendezvous",
    "SharedGroup",
    "SteadyProgram",
    "backend_for",
    "backend_for_heads",
    "choose_rows",
    "get_backend",
    "have_native_collectives",
    "instruction_sets",
    "is_available",
    "join",
    "look_up",
    "make_rendezvous",
    "new_text_index",
    "row_settings",
]
