"""How many threads the calling thread's device may use.

Each device has a thread of its own that makes its plans and runs them. Torch keeps such a number, too, but a part of
it is global: a second model in the process would change the first one's.
"""

from __future__ import annotations

import threading

import torch

_own = threading.local()


def use_threads(n_threads: int) -> None:
    """For what the calling thread prepares and runs from now on."""
    _own.n_threads = n_threads
    torch.set_num_threads(n_threads)


def n_threads() -> int:
    """What was set for the calling thread, otherwise what torch would use."""
    count: int = getattr(_own, "n_threads", 0) or torch.get_num_threads()
    return count
