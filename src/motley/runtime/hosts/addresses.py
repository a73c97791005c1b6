"""The addresses by which the processes of a crew find each other. They travel over the control connections."""

from __future__ import annotations

import struct
import threading

from motley.errors import DeviceError
from motley.runtime.hosts.protocol import ProtocolError

_MAX_KEY, _MAX_VALUE, _MAX_ADDRESSES = 256, 64 << 10, 1024
_WAIT_SECONDS = 60.0
_KEY_SIZE = struct.Struct("<H")


class AddressBook:
    """Addresses by key. One thread waits for those that another one puts in."""

    def __init__(self) -> None:
        self._found: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.is_closed = False

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            if len(self._found) >= _MAX_ADDRESSES:
                raise ProtocolError("too many addresses")
            self._found[key] = value
            self._changed.notify_all()

    def lookup(self, key: str) -> bytes:
        """Waits for an address. DeviceError if the book is closed meanwhile."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._found or self.is_closed, _WAIT_SECONDS):
                raise DeviceError(f"a process of the crew has not said its address for {_WAIT_SECONDS:.0f} s")
            if key not in self._found:
                raise DeviceError("a process of the crew was lost")
            return self._found[key]

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


def write_address(key: str, value: bytes) -> bytes:
    name = key.encode()
    return _KEY_SIZE.pack(len(name)) + name + value


def read_address(payload: bytes) -> tuple[str, bytes]:
    if len(payload) < _KEY_SIZE.size:
        raise ProtocolError("an address without a key")
    (n,) = _KEY_SIZE.unpack_from(payload)
    key, value = payload[_KEY_SIZE.size :][:n], payload[_KEY_SIZE.size + n :]
    if n > _MAX_KEY or len(key) != n or len(value) > _MAX_VALUE:
        raise ProtocolError("an address that is too long")
    try:
        return key.decode(), value
    except UnicodeDecodeError:
        raise ProtocolError("an address whose key is no text") from None
