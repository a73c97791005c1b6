"""`torchrun … -m motley run …`: rank 0 runs the command, every other rank is a worker for it.

Ranks find each other by torchrun's store: rank 0 puts a random secret there, and each worker its address. Rank 0 then
names the workers' devices after its own. Imports torch only if torchrun has started the process.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

_SECRET, _DONE = "motley/secret", "motley/done"
_WAIT = timedelta(seconds=300)


def is_active() -> bool:
    """Whether torchrun has started this process beside others."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and os.environ["WORLD_SIZE"] not in ("0", "1")


def is_worker() -> bool:
    return is_active() and os.environ["RANK"] != "0"


@dataclass(frozen=True)
class Crew:
    """The devices of all ranks, and a file with their secret."""

    devices: str
    secret_file: Path


_files: list[Path] = []  # to be removed at the end


@cache
def gather(device: str) -> Crew:
    """Rank 0: waits for the workers. `device`: the devices of each rank; "auto": its GPU, or the CPU."""
    from motley.runtime.device_names import list_items

    store = _store()
    secret = secrets.token_hex(32)
    store.set(_SECRET, secret)
    names = [_own_device() if device == "auto" else device]
    for rank in range(1, int(os.environ["WORLD_SIZE"])):
        found, address = store.get(_key(rank)).decode().split(" ")
        own = found if device == "auto" else device
        names += [f"{name}@{address}" for name in list_items(own)]
    handle, path = tempfile.mkstemp(prefix="motley-secret-")
    with os.fdopen(handle, "w") as file:
        file.write(secret)
    _files.append(Path(path))
    return Crew(",".join(names), Path(path))


def work() -> int:
    """Another rank: serves rank 0 until that has ended. Returns the exit code."""
    import threading

    import torch.distributed as dist

    from motley.runtime.hosts.serving import WorkerServer

    store = _store()
    secret = store.get(_SECRET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent: which address is ours?
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        own = probe.getsockname()[0]
    server = WorkerServer(f"{own}:0", secret)
    threading.Thread(target=server.serve, daemon=True).start()
    store.set(_key(int(os.environ["RANK"])), f"{_own_device()} {server.address}")
    timeout: Any = dist.DistStoreError
    while True:
        try:
            store.wait([_DONE], timedelta(seconds=1))
            break
        except timeout:
            continue
        except RuntimeError:  # the store has ended, and rank 0 with it
            break
    server.close()
    return 0


def finish() -> None:
    """Rank 0: lets the workers end."""
    for path in _files:
        path.unlink(missing_ok=True)
    _files.clear()
    try:
        _store().set(_DONE, "1")
    except RuntimeError:  # torchrun has ended already
        return


def _store() -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    environment = os.environ
    is_master = environment["RANK"] == "0" and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=is_master,
        timeout=_WAIT,
        wait_for_workers=False,
    )


def _key(rank: int) -> str:
    return f"motley/address/{rank}"


def _own_device() -> str:
    import torch

    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % n_gpus}" if n_gpus else "cpu"
