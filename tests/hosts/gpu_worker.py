"""`motley worker` with a GPU that is not there: `cuda:0` runs its Triton kernels in their interpreter, on the CPU.

The variable FAKE_GPU_BYTES is the memory that the GPU has. A process of its own, started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from motley import backends
from motley.backends import Backend, DeviceOffer
from motley.cli import main
from motley.runtime.hosts import offers, opening

KERNELS = Path(__file__).parent.parent / "backends" / "cuda"
sys.path.append(str(KERNELS))


def backend_for(device: str, name: str, offer: DeviceOffer | None = None) -> Backend:
    if device != "cuda:0":
        return backends.backend_for(device, name, offer)
    runpy.run_path(str(KERNELS / "conftest.py"))  # mends and quickens the interpreter
    from cuda_models import use_few_programs

    from motley.backends.cuda.backend import CudaBackend
    from motley.backends.cuda.kernels import matvec

    use_few_programs(pytest.MonkeyPatch())
    matvec.tile_for = lambda n_columns: matvec.Tile(256, 2, 1)
    return CudaBackend("cpu", captures=False)


for module in (offers, opening):
    module.backend_for = backend_for  # type: ignore[attr-defined]
offers.known_devices = lambda: ("cpu", "cuda:0")  # type: ignore[attr-defined]
offers.usable_bytes = lambda gpu: int(os.environ["FAKE_GPU_BYTES"])  # type: ignore[attr-defined]
main()
