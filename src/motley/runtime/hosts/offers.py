"""A worker's description of its devices, by which rank 0 plans: its own machine may have no such devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from motley.backends import DeviceOffer, backend_for
from motley.errors import DeviceError, MotleyError
from motley.runtime.budget import host_bytes
from motley.runtime.crew import Crew, Device, known_devices
from motley.runtime.hosts.calling import ask_devices
from motley.runtime.hosts.protocol import ProtocolError
from motley.runtime.inventory import usable_bytes

_MAX_BYTES = 1 << 60
_MAX_TEXT = 500


def own_offers() -> dict[str, dict[str, Any]]:
    """By device of this process, for a message: memory, what its backend can do, and why it cannot be used."""
    return {name: _own_offer(name) for name in known_devices()}


def _own_offer(name: str) -> dict[str, Any]:
    try:
        memory = usable_bytes(name) if name.startswith("cuda") else host_bytes()
        return {"memory": memory, "has_trees": backend_for(name, "auto").has_trees, "refusal": ""}
    except Exception as error:  # no Triton, or a GPU that does not work
        return {"memory": None, "has_trees": False, "refusal": _text(error)}


def _text(error: Exception) -> str:
    text = str(error) if isinstance(error, MotleyError) else f"{type(error).__name__}: {error}"
    return text[:_MAX_TEXT]


def with_offers(crew: Crew, secret: bytes) -> Crew:
    """The crew with what each worker says of its devices. DeviceError if one of them is not there."""
    offers = {host: ask_devices(host, secret).get("offers") for host in crew.hosts}
    devices = (
        device if device.host is None else replace(device, offer=_read(device, offers[device.host]))
        for device in crew.devices
    )
    return replace(crew, devices=tuple(devices))


def _read(device: Device, offers: object) -> DeviceOffer:
    """The offer of a device. Messages are checked: a worker may be anything that knows the secret."""
    name = device.name if device.is_gpu else "cpu"  # its worker checks the cores in its name
    if not isinstance(offers, dict) or not offers:
        raise ProtocolError(f"{device.host} does not say which devices it has")
    offer = offers.get(name)
    if offer is None:
        known = ", ".join(str(each) for each in offers)
        raise DeviceError(f"{device.host} has no device {name!r}", hint=f"it has: {known:.{_MAX_TEXT}}")
    match offer:
        case {
            "memory": int() | None as memory,
            "has_trees": bool() as has_trees,
            "refusal": str() as refusal,
        }:
            if refusal:
                raise DeviceError(f"{device.full_name}: {refusal:.{_MAX_TEXT}}")
            if memory is None or 0 <= memory < _MAX_BYTES:
                return DeviceOffer(memory, has_trees)
    raise ProtocolError(f"{device.host} says of {name} what cannot be right")
