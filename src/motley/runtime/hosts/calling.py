"""Connections from rank 0 to workers."""

from __future__ import annotations

import socket
import struct
from typing import Any

from motley.errors import DeviceError, MotleyError
from motley.runtime.device_names import parse_address
from motley.runtime.hosts.protocol import Channel, Kind, ProtocolError, call, read_json
from motley.runtime.inventory import DeviceInfo

CONNECT_SECONDS = 10.0
SILENT_SECONDS = 8.0  # without an answer to pings a worker is lost


def connect(host: str, secret: bytes) -> Channel:
    """A connection to a worker, after the handshake. DeviceError, with the host's name, if there is none."""
    address, port = parse_address(host)
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
    except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be a name
        raise DeviceError(
            f"no worker answers at {host:.200}: {getattr(error, 'strerror', None) or error}",
            hint=f"start one there: motley worker --listen {host:.200}",
        ) from error
    try:
        channel = call(connection, secret)
    except (EOFError, OSError) as error:
        connection.close()
        raise DeviceError(f"{host} has ended the connection: {error}") from error
    except ProtocolError as error:
        connection.close()
        raise DeviceError(f"{host}: {error.message}", hint=error.hint) from error
    connection.settimeout(None)
    # A stopped worker does not read: a send must not wait longer than a ping.
    timeout = struct.pack("ll", int(SILENT_SECONDS), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    return channel


def describe_host(host: str, secret: bytes) -> list[DeviceInfo]:
    """The devices of a worker, as shown to users."""
    try:
        found = ask_devices(host, secret)["devices"]
        return [DeviceInfo(**{**device, "device": f"{device['device']}@{host}"}) for device in found]
    except (KeyError, TypeError) as error:
        raise DeviceError(f"{host} does not say which devices it has: {error}") from error


def ask_devices(host: str, secret: bytes) -> dict[str, Any]:
    """A worker's answer to the question which devices it has: `devices`, for users, and `offers` (offers.py)."""
    channel = connect(host, secret)
    try:
        channel.settimeout(CONNECT_SECONDS)
        channel.send(Kind.DESCRIBE)
        kind, payload = channel.receive()
        if kind != Kind.RESULT:
            raise DeviceError(f"{host} does not say which devices it has")
        return read_json(payload)
    except (EOFError, OSError, MotleyError) as error:
        raise DeviceError(f"{host} does not say which devices it has: {error}") from error
    finally:
        channel.close()
