"""What each device needs before anything is loaded, and whether its budget allows it."""

from __future__ import annotations

from dataclasses import dataclass

from motley.errors import DeviceError
from motley.models import BatchShape
from motley.plan import lay_out
from motley.runtime.loading import weight_bytes
from motley.runtime.splitting import ModelSplit


@dataclass(frozen=True)
class Needs:
    """Bytes that a device needs, apart from the KV cache."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.activations


def device_needs(split: ModelSplit, largest: BatchShape) -> list[Needs]:
    """Of each device, for batches up to `largest`. Loads nothing."""
    shares = [split.share(device, largest) for device in range(len(split.crew))]
    return [Needs(weight_bytes(share), lay_out(share.graph).n_bytes) for share in shares]


def room_for_cache(split: ModelSplit, needs: list[Needs]) -> list[int | None]:
    """What each budget leaves for the KV cache; DeviceError, with numbers, where there is nothing left."""
    room: list[int | None] = []
    for index, (device, need) in enumerate(zip(split.crew.devices, needs, strict=True)):
        if device.memory is not None and device.memory < need.total:
            raise DeviceError(
                f"device {split.crew.label(index)} needs {show_bytes(need.weights)} for weights and "
                f"{show_bytes(need.activations)} for activations, but may use {show_bytes(device.memory)}: "
                f"{show_bytes(need.total - device.memory)} are missing",
                hint="give it a smaller share (-ts), raise --device-memory, or add a device",
            )
        room.append(None if device.memory is None else device.memory - need.total)
    return room


def show_bytes(n: int) -> str:
    """1536 → '1.5 KiB'."""
    size, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"
