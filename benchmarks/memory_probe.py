"""The speed of memory at this moment, for benchmarks on machines whose memory is shared with other machines."""

from __future__ import annotations

import time

import torch

from motley.backends.cpu.native import FORMATS, address, core
from motley.backends.cpu.slabs import Slabs

_COLUMNS, _REPETITIONS = 2048, 2


class MemoryProbe:
    """Reads float32 weights by the default pattern, which needs the fewest operations per byte."""

    def __init__(self, n_threads: int, n_bytes: int = 512 * 2**20) -> None:
        n_rows = n_bytes // (4 * _COLUMNS)
        # The program has addresses only.
        self._weights = Slabs().take(n_bytes).fill_(1)
        self._x, self._out = torch.ones(_COLUMNS), torch.empty(n_rows)
        self._program = core.Program(core.Pool(n_threads))
        part = (address(self._weights), FORMATS["F32"], n_rows, 0, 0, address(self._out), n_rows)
        self._program.matmul(address(self._x), _COLUMNS, 0, 1, _COLUMNS, [part], 0, False)

    def bytes_per_second(self) -> float:
        """Measured in some hundredths of a second."""
        seconds = []
        for _ in range(_REPETITIONS):
            started = time.perf_counter()
            self._program.run()
            seconds.append(time.perf_counter() - started)
        return len(self._weights) / min(seconds)
