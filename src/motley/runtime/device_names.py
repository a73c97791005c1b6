"""Names of devices as users give them: `cpu`, `cuda:0@10.0.0.2:29400`, `(cuda:0,cuda:1)@a,(cpu)@b`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from motley.errors import ConfigError, DeviceError

DEFAULT_PORT = 29400  # of workers
_ADDRESS = re.compile(r"(\[(?P<v6>[0-9a-fA-F:.%]+)\]|(?P<host>[^:\[\]@/\s]+))(:(?P<port>[0-9]{1,5}))?")
_GROUP = re.compile(r"\((?P<devices>[^()]*)\)\s*(@(?P<address>.*))?")
_EXAMPLE = 'for example --device "(cuda:0,cuda:1),(cpu)@10.0.0.2"'


@dataclass(frozen=True)
class NamedDevices:
    """Devices in the order of their names."""

    names: list[str]  # of each device on its host
    hosts: list[str | None]  # address and port of each device's worker; None: this process
    groups: list[
        tuple[int, ...]
    ]  # the devices between parentheses, and single devices; empty: no parentheses


def parse_devices(devices: str | Sequence[str]) -> NamedDevices:
    """Devices, their hosts and their groups. Whether there are such devices is not checked here."""
    given: object = devices  # of any type: it is a caller's
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise DeviceError(f"devices is {devices!r:.60}", hint='it must be text, or several: "cuda:0,cpu"')
    text = devices if isinstance(devices, str) else ",".join(map(str, devices))
    names: list[str] = []
    hosts: list[str | None] = []
    groups: list[tuple[int, ...]] = []
    items = list_items(text)
    for item in items:
        first = len(names)
        for name, host in _members(item):
            names.append("cuda:0" if name == "cuda" else name)
            hosts.append(host)
        groups.append(tuple(range(first, len(names))))
    return NamedDevices(names, hosts, groups if any(item.startswith("(") for item in items) else [])


def list_items(text: str) -> list[str]:
    """The devices and groups of a list: `a,(b,c)@d` → `a`, `(b,c)@d`."""
    items, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not 0 <= depth <= 1:
            what = "parentheses within parentheses" if depth > 1 else "a ) without a ("
            raise DeviceError(f"the devices {text!r:.100} have {what}", hint=_EXAMPLE)
        if letter == "," and depth == 0:
            items.append("")
        else:
            items[-1] += letter
    if depth:
        raise DeviceError(f"the devices {text!r:.100} have a ( without a )", hint=_EXAMPLE)
    return [item.strip() for item in items if item.strip()]


def _members(item: str) -> list[tuple[str, str | None]]:
    """Name and host of each device of a group, or of a single device."""
    if "(" not in item:
        name, _, address = item.partition("@")
        return [(name, _host(address) if "@" in item else None)]
    match = _GROUP.fullmatch(item)
    inner = [] if match is None else [part.strip() for part in match["devices"].split(",") if part.strip()]
    if match is None or not inner:
        raise DeviceError(f"{item!r:.100} is no group of devices", hint=_EXAMPLE)
    found = [member for part in inner for member in _members(part)]
    inside = {host for _, host in found}
    if match["address"] is not None:
        if inside != {None}:
            raise DeviceError(
                f"the group {item!r:.100} has worker addresses inside and after its parentheses",
                hint=_EXAMPLE,
            )
        host = _host(match["address"])
        return [(name, host) for name, _ in found]
    if len(inside) > 1:
        raise DeviceError(
            f"the group {item!r:.100} has devices of several processes",
            hint="a group splits tensors within one process; --split-mode tensor, without parentheses, splits them "
            "over hosts",
        )
    return found


def _host(address: str) -> str:
    return join_address(*parse_address(address))


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host and port of `10.0.0.2:29400`, `host` or `[::1]:29400`."""
    match = _ADDRESS.fullmatch(text.strip())
    port = int(match["port"] or default_port) if match else -1
    if match is None or not 0 <= port < 1 << 16:
        raise ConfigError(f"{text!r} is not the address of a worker", hint="for example 10.0.0.2:29400")
    return match["v6"] or match["host"], port


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of this machine, and cannot be reached from others."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
